"""What a decoder model promises beside its numbers: checks, atomic failures, threads."""

from __future__ import annotations

import importlib.util
import threading
from dataclasses import replace

import numpy as np
import pytest

from sakiyomi.errors import CheckpointError, ContextLengthError, ParameterError
from sakiyomi.params import SamplingParams
from sakiyomi.types import Cache, Checkpoint, History, Model, Span

torch = pytest.importorskip("torch")
from sakiyomi.models.torch import TorchModel  # noqa: E402

CONFIG = {
    "model_type": "llama", "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 12, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint():
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (40, 16), "model.norm.weight": (16,)}
    for layer in (0, 1):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (16,),
            f"{prefix}post_attention_layernorm.weight": (16,),
            f"{prefix}self_attn.q_proj.weight": (16, 16),
            f"{prefix}self_attn.k_proj.weight": (8, 16),
            f"{prefix}self_attn.v_proj.weight": (8, 16),
            f"{prefix}self_attn.o_proj.weight": (16, 16),
            f"{prefix}mlp.gate_proj.weight": (24, 16),
            f"{prefix}mlp.up_proj.weight": (24, 16),
            f"{prefix}mlp.down_proj.weight": (16, 24),
        }
    tensors = {name: rng.normal(size=shape).astype(np.float32) * 0.4 for name, shape in shapes.items()}
    return Checkpoint(name="tiny", config=CONFIG, tensors=tensors, tokenizer=None, end_token_ids=(3, 4))


def load_torch(checkpoint):
    torch.set_num_threads(1)
    return TorchModel.load(checkpoint)


def load_native(checkpoint):
    from sakiyomi.models.native import NativeModel

    return NativeModel.load(checkpoint, dtype="float32", threads=2)


needs_native = pytest.mark.skipif(
    importlib.util.find_spec("sakiyomi._native") is None, reason="the native kernels are not built"
)
LOADERS = [pytest.param(load_torch, id="torch"), pytest.param(load_native, id="native", marks=needs_native)]


@pytest.fixture(params=LOADERS)
def model(request, checkpoint):
    return request.param(checkpoint)


def cached(model, ids):
    cache = model.new_cache()
    model.forward([Span(cache, ids, list(range(-1, len(ids) - 1)))])
    cache.keep(range(len(ids)))
    return cache


def test_info_and_protocols(model):
    model_as_protocol: Model = model
    assert isinstance(model.new_cache(), Cache)
    info = model_as_protocol.info
    assert (info.name, info.architecture, info.dtype) == ("tiny", "llama", "float32")
    assert (info.vocab_size, info.max_model_len, info.num_layers, info.hidden_size) == (40, 12, 2, 16)
    assert info.end_token_ids == (3, 4)
    assert info.is_bit_exact == (model.decoder.ops.name == "native")


def test_loading_refuses_bad_options(checkpoint):
    assert TorchModel.load(checkpoint, max_model_len=5).info.max_model_len == 5
    assert TorchModel.load(checkpoint, vocab_size=41).info.vocab_size == 40
    for options, message in (
        ({"max_model_len": 13}, "2 to 12"),
        ({"max_model_len": 1}, "2 to 12"),
        ({"dtype": "int8"}, "float32, bfloat16, float16, float64"),
        ({"device": "abacus"}, "abacus"),
    ):
        with pytest.raises(ParameterError, match=message):
            TorchModel.load(checkpoint, **options)
    with pytest.raises(CheckpointError, match="gpt2"):
        TorchModel.load(replace(checkpoint, config={"model_type": "gpt2"}))


@pytest.mark.parametrize(
    ("tokens", "parents", "options", "message"),
    [
        ([], [], {}, "at least one token|one token or more"),
        ([1, 2], [-1], {}, "2 tokens and 1 parents"),
        ([40], [-1], {}, "id 40 .* 0 to 39"),
        ([-1], [-1], {}, "id -1"),
        ([1, 2], [-1, 1], {}, "row 1 has parent 1"),
        ([1], [-2], {}, "parent -2"),
        ([1, 2], [-1, 0], {"logit_rows": (2,)}, "logit row 2"),
        ([1, 2], [-1, 0], {"logit_rows": (1, 0)}, "logit row 0"),
        ([1], [-1], {"taps": (3,)}, "tap 3"),
    ],
)
def test_spans_that_cannot_be_run_are_refused(model, tokens, parents, options, message):
    good = Span(cached(model, [1, 2]), [5], [-1], (0,))
    with pytest.raises(ParameterError, match=message):
        model.forward([good, Span(model.new_cache(), tokens, parents, **options)])
    assert good.cache.num_pending == 0


def test_a_shared_or_foreign_cache_is_refused(model):
    cache = model.new_cache()
    with pytest.raises(ParameterError, match="share a cache"):
        model.forward([Span(cache, [1], [-1]), Span(cache, [2], [-1])])
    with pytest.raises(ParameterError, match="another model"):
        model.forward([Span(model.shallow(1).new_cache(), [1], [-1])])


def test_the_context_is_a_matter_of_depth_not_of_rows(model):
    cache = cached(model, list(range(10)))
    siblings = [-1] + [0] * 9
    model.forward([Span(cache, list(range(10)), siblings)])
    with pytest.raises(ContextLengthError, match="12"):
        model.forward([Span(cache, [1, 2, 3], [-1, 0, 1])])


def test_outputs_count_the_asked_rows(model):
    ids = [5, 9, 1, 7]
    every = model.forward([Span(model.new_cache(), ids, [-1, 0, 1, 2], range(4))])[0]
    some, none = model.forward(
        [Span(model.new_cache(), ids, [-1, 0, 1, 2], (1, 3)), Span(model.new_cache(), ids, [-1, 0, 1, 2])]
    )
    for i, row in enumerate((1, 3)):
        assert some.row(i).dtype == np.float32
        np.testing.assert_allclose(some.row(i), every.row(row), atol=1e-5)
    assert some.argmax() == [int(every.row(1).argmax()), int(every.row(3).argmax())]
    greedy = History([5, 9, 1, 7], 4, SamplingParams(temperature=0.0), seed=0)
    biased = replace(greedy, params=SamplingParams(temperature=0.0, logit_bias={17: 100.0}))
    assert some.choose(1, greedy) == some.argmax()[1]
    assert some.choose(1, biased) == 17
    assert none.argmax() == []
    with pytest.raises(ParameterError, match="no logits"):
        none.row(0)
    assert model.forward([]) == []


def test_an_interrupted_pass_leaves_no_rows_to_keep(model, monkeypatch):
    cache = cached(model, [1, 2])

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model.decoder, "forward", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model.forward([Span(cache, [3], [-1])])
    assert (cache.length, cache.num_pending) == (2, 0)
    model.forward([Span(cache, [3], [-1])])  # the lock is free again


def test_a_pass_keeps_no_gradients(checkpoint):
    model = load_torch(checkpoint)
    model.decoder.norm.requires_grad_()
    output = model.forward([Span(model.new_cache(), [1], [-1], (0,), (2,))])[0]
    assert not output.taps.requires_grad


def test_threads_share_one_model(model):
    def decode(seed, results):
        rng = np.random.default_rng(seed)
        cache, ids = model.new_cache(), rng.integers(0, 40, 10).tolist()
        for token in ids:
            output = model.forward([Span(cache, [token], [-1], (0,))])[0]
            cache.keep([0])
        results[seed] = output.row(0)

    alone: dict = {}
    for seed in range(4):
        decode(seed, alone)
    together: dict = {}
    threads = [threading.Thread(target=decode, args=(seed, together)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(4):
        np.testing.assert_array_equal(together[seed], alone[seed])
