"""The decoder against transformers: tiny random checkpoints of every family, written by transformers, read by us."""

from __future__ import annotations

import copy
import importlib.util

import numpy as np
import pytest

from sakiyomi.checkpoints.safetensors import read_safetensors
from sakiyomi.errors import CheckpointError, ParameterError
from sakiyomi.nets.decoder import Decoder, DecoderConfig
from sakiyomi.types import Span

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from sakiyomi.models.torch import TorchModel  # noqa: E402
from sakiyomi.ops.torch import TorchOps  # noqa: E402

TOLERANCE = 1e-4
SMALL = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.15,
}  # fmt: skip
WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
# Factors and lengths are chosen so that slow, blended and fast dimensions all occur.
ROPES = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {
        "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32,
        "beta_fast": 4.0, "beta_slow": 0.5,
    },
    "yarn_mscale": {
        "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32,
        "mscale": 1.5, "mscale_all_dim": 0.7, "truncate": False,
    },
}  # fmt: skip
FAMILIES = {
    "llama": ("Llama", {}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama_biased": ("Llama", {"attention_bias": True}),
    **{f"llama_{name}": ("Llama", {"rope_parameters": rope}) for name, rope in ROPES.items()},
    "mistral": ("Mistral", {"sliding_window": 6}),
    "mistral_full": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2", {}),
    "qwen2_windowed": ("Qwen2", WINDOW),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_biased": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3_windowed": ("Qwen3", WINDOW | {"head_dim": 16}),
}


def load_torch(checkpoint, **options):
    return TorchModel.load(checkpoint, **options)


def load_native(checkpoint, **options):
    from sakiyomi.models.native import NativeModel

    return NativeModel.load(checkpoint, dtype="float32", threads=1, **options)


needs_native = pytest.mark.skipif(
    importlib.util.find_spec("sakiyomi._native") is None, reason="the native kernels are not built"
)
LOADERS = [pytest.param(load_torch, id="torch"), pytest.param(load_native, id="native", marks=needs_native)]


def write_reference(folder, family, **options):
    """A random checkpoint in `folder` and transformers' own model of it."""
    torch.set_num_threads(1)
    kind, overrides = FAMILIES[family]
    config = getattr(transformers, f"{kind}Config")(**SMALL | overrides | options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:  # transformers starts these at 1 and 0, which hides mistakes
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """Folder and reference model of a family, written once."""
    written = {}

    def get(family):
        if family not in written:
            folder = tmp_path_factory.mktemp(family)
            written[family] = (folder, write_reference(folder, family))
        return written[family]

    return get


def random_ids(count, seed=0):
    return np.random.default_rng(seed).integers(0, SMALL["vocab_size"], count).tolist()


def chain(count):
    return list(range(-1, count - 1))


def expected_logits(reference, ids):
    with torch.no_grad():
        return reference(torch.tensor([ids])).logits[0].numpy()


def rows_of(output, count):
    return np.stack([output.row(i) for i in range(count)])


def whole_logits(model, ids):
    output = model.forward([Span(model.new_cache(), ids, chain(len(ids)), range(len(ids)))])[0]
    return rows_of(output, len(ids))


def assert_close(ours, reference, tolerance=TOLERANCE):
    assert np.abs(reference).max() > 1, "logits this small prove nothing"
    np.testing.assert_allclose(ours, reference, rtol=0, atol=tolerance)


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(references, family, load):
    folder, reference = references(family)
    model = load(read_safetensors(folder))
    ids = random_ids(50)
    expected = expected_logits(reference, ids)
    assert_close(whole_logits(model, ids), expected)
    # The same prompt in chunks: one without logits, one with some, one token.
    cache = model.new_cache()
    for start, stop, wanted in ((0, 17, ()), (17, 49, (0, 13, 31)), (49, 50, (0,))):
        output = model.forward([Span(cache, ids[start:stop], chain(stop - start), wanted)])[0]
        cache.keep(range(stop - start))
        for i, row in enumerate(wanted):
            assert_close(output.row(i), expected[start + row])


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2_windowed", "qwen3"])
def test_each_tree_row_equals_its_own_chain(references, family, load):
    folder, reference = references(family)
    model = load(read_safetensors(folder))
    rng = np.random.default_rng(1)
    # Two sequences of different lengths in one call, both trees below an uncached tail.
    prompts = [random_ids(11, 2), random_ids(4, 3)]
    spans = []
    for prompt, size in zip(prompts, (13, 6), strict=True):
        cache = model.new_cache()
        model.forward([Span(cache, prompt, chain(len(prompt)))])
        cache.keep(range(len(prompt)))
        parents = [-1, 0] + [int(rng.integers(1, row)) for row in range(2, size)]
        spans.append(Span(cache, random_ids(size, size), parents, range(size)))
    outputs = model.forward(spans)
    for prompt, span, output in zip(prompts, spans, outputs, strict=True):
        for row in range(len(span.tokens)):
            path, node = [], row
            while node >= 0:
                path.insert(0, node)
                node = span.parents[node]
            ids = prompt + [span.tokens[node] for node in path]
            assert_close(output.row(row), expected_logits(reference, ids)[-1])
        # The deepest path is kept, and decoding goes on behind it.
        span.cache.keep(path)
        after = model.forward([Span(span.cache, [7], [-1], [0])])[0]
        assert_close(after.row(0), expected_logits(reference, [*ids, 7])[-1])


@pytest.mark.parametrize("load", LOADERS)
def test_taps_are_the_hidden_states(references, load):
    folder, reference = references("llama")
    model = load(read_safetensors(folder))
    ids = random_ids(9)
    with torch.no_grad():
        states = reference(torch.tensor([ids]), output_hidden_states=True).hidden_states
    first = Span(model.new_cache(), ids, chain(9), (), taps=(3, 0, 2))
    second = Span(model.new_cache(), ids[:4], chain(4), (), taps=(1,))
    third = Span(model.new_cache(), ids[:2], chain(2), (1,))
    outputs = model.forward([first, second, third])
    ops = model.decoder.ops
    taps = [ops.to_numpy(outputs[0].taps[:, start : start + 64]) for start in (0, 64, 128)]
    np.testing.assert_allclose(taps[1], states[0][0], atol=TOLERANCE)
    np.testing.assert_allclose(taps[2], states[2][0], atol=TOLERANCE)
    normed = reference.model.norm(torch.tensor(taps[0])).detach()
    np.testing.assert_allclose(normed, states[3][0], atol=TOLERANCE)
    np.testing.assert_allclose(ops.to_numpy(outputs[1].taps), states[1][0, :4], atol=TOLERANCE)
    assert outputs[2].taps is None


@pytest.mark.parametrize("load", LOADERS)
def test_shallow_runs_the_first_layers(references, load):
    folder, reference = references("qwen2_windowed")
    model = load(read_safetensors(folder))
    cut = copy.deepcopy(reference)
    cut.model.layers = cut.model.layers[:2]
    cut.config.num_hidden_layers = cut.model.config.num_hidden_layers = 2
    cut.config.layer_types = cut.config.layer_types[:2]
    shallow = model.shallow(2)
    assert shallow.info.num_layers == 2
    assert shallow.decoder.layers[1] is model.decoder.layers[1]
    assert shallow.new_cache().slots().keys.shape[0] == 2
    ids = random_ids(20)
    assert_close(whole_logits(shallow, ids), expected_logits(cut, ids))
    # Over a cache of the whole model it fills the first layers only; the whole model then writes all.
    cache = model.new_cache()
    shallow.forward([Span(cache, ids, chain(20))])
    output = model.forward([Span(cache, ids, chain(20), [19])])[0]
    assert_close(output.row(0), expected_logits(reference, ids)[-1])
    for count in (0, 4):
        with pytest.raises(ParameterError, match="1 to 3"):
            model.shallow(count)


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize("family", ["llama", "llama_tied"])
def test_padding_rows_of_the_head_are_cut(references, family, load):
    folder, reference = references(family)
    model = load(read_safetensors(folder), vocab_size=90)
    assert model.info.vocab_size == 90
    ids = [token % 90 for token in random_ids(12)]
    assert_close(whole_logits(model, ids), expected_logits(reference, ids)[:, :90])
    with pytest.raises(ParameterError, match="0 to 89"):
        model.forward([Span(model.new_cache(), [90], [-1], [0])])
    assert load(read_safetensors(folder), vocab_size=102).info.vocab_size == 101


def test_double_and_half_precision(references):
    folder, reference = references("qwen3")
    ids = random_ids(30)
    for dtype, tolerance in (("float64", 1e-5), ("bfloat16", 0.3), ("float16", 0.03)):
        wide = copy.deepcopy(reference).to(getattr(torch, dtype))
        with torch.no_grad():
            expected = wide(torch.tensor([ids])).logits[0].float().numpy()
        assert_close(whole_logits(TorchModel.load(read_safetensors(folder), dtype=dtype), ids), expected, tolerance)


def test_old_configuration_keys_mean_the_same(references):
    folder, _ = references("llama_yarn")
    new = dict(read_safetensors(folder).config)
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    scaling = dict(new["rope_parameters"])
    old["rope_theta"] = scaling.pop("rope_theta")
    scaling["type"] = scaling.pop("rope_type")
    old["rope_scaling"] = scaling
    ours, reference = DecoderConfig.from_dict(old), DecoderConfig.from_dict(new)
    np.testing.assert_array_equal(ours.inv_freq, reference.inv_freq)
    assert (ours.rope_scale, ours.max_positions) == (reference.rope_scale, reference.max_positions)
    assert reference.rope_scale > 1


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_missing_keys_take_the_defaults_of_transformers(kind):
    given = {"vocab_size": 9, "hidden_size": 256, "intermediate_size": 9, "num_hidden_layers": 30}
    given |= {"num_attention_heads": 32, "use_sliding_window": True}
    reference = getattr(transformers, f"{kind}Config")(**given)
    ours = DecoderConfig.from_dict({"model_type": kind.lower()} | given)
    head_dim = getattr(reference, "head_dim", None) or 256 // 32
    assert (ours.num_kv_heads, ours.head_dim) == (reference.num_key_value_heads, head_dim)
    assert (ours.eps, ours.tied) == (reference.rms_norm_eps, reference.tie_word_embeddings)
    assert ours.max_positions == reference.max_position_embeddings
    np.testing.assert_allclose(ours.inv_freq[1], reference.rope_parameters["rope_theta"] ** (-2 / head_dim), rtol=1e-6)
    kinds = getattr(reference, "layer_types", None) or [f"{'full' if kind == 'Llama' else 'sliding'}_attention"] * 30
    assert ours.windows == tuple(None if kind == "full_attention" else 4096 for kind in kinds)


@pytest.mark.parametrize("family", ["llama", *(f"llama_{name}" for name in ROPES)])
def test_rotary_frequencies_equal_transformers(references, family):
    folder, reference = references(family)
    ours = DecoderConfig.from_dict(read_safetensors(folder).config)
    rotary = reference.model.rotary_emb
    np.testing.assert_allclose(ours.inv_freq, rotary.inv_freq.numpy(), rtol=2e-7)
    assert ours.rope_scale == pytest.approx(rotary.attention_scaling, rel=1e-12)


def test_frequency_factors_of_a_gguf_file_divide():
    plain = {"model_type": "llama"} | SMALL
    factors = np.linspace(1, 8, 8).tolist()
    expected = DecoderConfig.from_dict(plain).inv_freq / factors
    ours = DecoderConfig.from_dict(plain | {"rope_freq_factors": factors}).inv_freq
    np.testing.assert_allclose(ours, expected, rtol=2e-7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, r"'mamba' is not supported; supported are llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "None is not supported"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope' is not supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor is None"),
        ({"rope_scaling": ROPES["llama3"] | {"low_freq_factor": 4.0}}, "low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"num_attention_heads": "4"}, "num_attention_heads is '4'"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["linear_attention"] * 3}, "layer_types"),
    ],
)
def test_unsupported_configurations_are_refused(changes, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        DecoderConfig.from_dict({"model_type": "llama"} | SMALL | changes)
    assert "\n" not in str(caught.value)


def test_missing_and_mis_shaped_tensors_are_named(references):
    checkpoint = read_safetensors(references("qwen2")[0])
    config, tensors = DecoderConfig.from_dict(checkpoint.config), dict(checkpoint.tensors)
    ops = TorchOps()
    Decoder(ops, config, tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8)})
    bias = tensors.pop("model.layers.1.self_attn.k_proj.bias")
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.1\.self_attn\.k_proj\.bias"):
        Decoder(ops, config, tensors)
    tensors["model.layers.1.self_attn.k_proj.bias"] = bias[:-1]
    with pytest.raises(CheckpointError, match=r"k_proj\.bias has shape \[31\].* \[32\]"):
        Decoder(ops, config, tensors)
    with pytest.raises(CheckpointError, match=r"lacks .* and \d+ more"):
        Decoder(ops, config, {})
