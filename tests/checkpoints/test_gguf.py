"""checkpoints/gguf.py: values exactly as the gguf package reads them, names and order as transformers has them."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize

from sakiyomi.checkpoints.gguf import KINDS, read_gguf
from sakiyomi.errors import CheckpointError
from sakiyomi.types import Quantized

HIDDEN, INNER, HEADS, KV_HEADS, WIDTH, VOCAB, LAYERS = 256, 512, 4, 2, 64, 40, 2
EXACT = {Kind.Q4_0: 8, Kind.Q4_1: 0, Kind.Q5_0: 16, Kind.Q5_1: 0, Kind.Q8_0: 128}
FLOAT = (Kind.F32, Kind.F16, Kind.BF16)
K_QUANTS = (Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K)

TOKENS = ["<unk>", "<s>", "</s>", "<|im_end|>", "<|eot_id|>", *(chr(97 + i) for i in range(VOCAB - 5))]
TYPES = [2, 3, 3, 3, 1] + [1] * (VOCAB - 5)


def tensor_shapes(arch: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (HIDDEN,),
            "attn_q.weight": (HEADS * WIDTH, HIDDEN),
            "attn_k.weight": (KV_HEADS * WIDTH, HIDDEN),
            "attn_v.weight": (KV_HEADS * WIDTH, HIDDEN),
            "attn_output.weight": (HIDDEN, HEADS * WIDTH),
            "ffn_norm.weight": (HIDDEN,),
            "ffn_gate.weight": (INNER, HIDDEN),
            "ffn_up.weight": (INNER, HIDDEN),
            "ffn_down.weight": (HIDDEN, INNER),
        }
        if arch == "qwen2":
            layer |= {"attn_q.bias": (HEADS * WIDTH,), "attn_k.bias": (KV_HEADS * WIDTH,)}
            layer |= {"attn_v.bias": (KV_HEADS * WIDTH,)}
        if arch == "qwen3":
            layer |= {"attn_q_norm.weight": (WIDTH,), "attn_k_norm.weight": (WIDTH,)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def random_raw(kind: Kind, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """The stored form of a random matrix."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    if kind in K_QUANTS or kind == Kind.IQ4_NL:  # any bytes are a valid block
        return rng.integers(0, 256, (shape[0], shape[1] // block * size), dtype=np.uint8)
    return quantize(rng.standard_normal(shape, dtype=np.float32), kind)


def write_gguf(
    path: Path,
    arch: str = "llama",
    kind: Kind = Kind.F32,
    *,
    tensors: dict[str, np.ndarray | None] | None = None,
    fields: dict[str, tuple[Any, gguf.GGUFValueType | None]] | None = None,
    tokenizer: bool = True,
) -> dict[str, tuple[np.ndarray, Kind]]:
    """Write a small model; `tensors` replaces or removes some, `fields` replaces or removes metadata."""
    rng = np.random.default_rng(7)
    value = gguf.GGUFValueType
    meta: dict[str, tuple[Any, gguf.GGUFValueType]] = {
        f"{arch}.block_count": (LAYERS, value.UINT32),
        f"{arch}.context_length": (128, value.UINT32),
        f"{arch}.embedding_length": (HIDDEN, value.UINT32),
        f"{arch}.feed_forward_length": (INNER, value.UINT32),
        f"{arch}.attention.head_count": (HEADS, value.UINT32),
        f"{arch}.attention.head_count_kv": (KV_HEADS, value.UINT32),
        f"{arch}.attention.layer_norm_rms_epsilon": (1e-5, value.FLOAT32),
        f"{arch}.rope.freq_base": (500000.0, value.FLOAT32),
    }
    if arch == "llama":
        meta[f"{arch}.rope.dimension_count"] = (WIDTH, value.UINT32)
    meta |= fields or {}  # type: ignore[arg-type]
    writer = gguf.GGUFWriter(path, arch)
    for key, (content, sort) in meta.items():
        if content is not None:
            writer.add_key_value(key, content, sort)
    if tokenizer:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(TOKENS)
        writer.add_token_types(TYPES)
        writer.add_token_scores([float(-i) for i in range(VOCAB)])
        writer.add_eos_token_id(2)
        writer.add_eot_token_id(5)
        writer.add_chat_template("{{ messages }}")
    stored: dict[str, tuple[np.ndarray, Kind]] = {}
    for name, shape in tensor_shapes(arch).items():
        if len(shape) == 1:
            stored[name] = (rng.standard_normal(shape, dtype=np.float32), Kind.F32)
        else:
            stored[name] = (random_raw(kind, shape, rng), kind)
    for name, array in (tensors or {}).items():
        if array is None:
            del stored[name]
        else:
            stored[name] = (array, Kind.F32 if array.dtype == np.float32 else kind)
    for name, (raw, sort) in stored.items():
        writer.add_tensor(name, raw, raw_dtype=sort)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def as_float(tensor: Any) -> np.ndarray:
    return tensor.dequantize() if isinstance(tensor, Quantized) else tensor


def to_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rotary pairs (2i, 2i + 1) of each head to halves (i, i + D / 2), one row at a time."""
    width = len(rows) // heads
    order = [
        h * width + (2 * i + part) for h in range(heads) for part in range(2) for i in range(width // 2)
    ]  # the row that holds dimension `part * D / 2 + i`
    return rows[order]


# ---------------------------------------------------------------------------------------------- values


def test_the_table_of_types_agrees_with_the_gguf_package() -> None:
    for number, kind in KINDS.items():
        assert Kind(number).name == kind.name
        assert gguf.GGML_QUANT_SIZES[Kind(number)] == (kind.num_values, kind.num_bytes)


@pytest.mark.parametrize("kind", [*FLOAT, *EXACT, *K_QUANTS], ids=lambda kind: kind.name)
def test_every_type_reads_as_the_gguf_package_reads_it(kind: Kind, tmp_path: Path) -> None:
    stored = write_gguf(tmp_path / "m.gguf", kind=kind)
    tensors = read_gguf(tmp_path / "m.gguf").tensors
    for name, ours, heads in (
        ("token_embd.weight", "model.embed_tokens.weight", 0),
        ("blk.1.ffn_down.weight", "model.layers.1.mlp.down_proj.weight", 0),
        ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight", HEADS),
        ("blk.0.attn_k.weight", "model.layers.0.self_attn.k_proj.weight", KV_HEADS),
        ("blk.0.attn_v.weight", "model.layers.0.self_attn.v_proj.weight", 0),
    ):
        tensor = tensors[ours]
        assert isinstance(tensor, Quantized) == (kind in EXACT)
        with np.errstate(all="ignore"):
            expected = dequantize(*stored[name])
        expected = to_halves(expected, heads) if heads else expected
        assert as_float(tensor).dtype == np.float32
        np.testing.assert_array_equal(as_float(tensor), expected)
    norm = tensors["model.layers.1.input_layernorm.weight"]
    np.testing.assert_array_equal(norm, stored["blk.1.attn_norm.weight"][0])
    assert norm.flags.writeable  # torch warns about memory that it must not write


@pytest.mark.parametrize("kind", EXACT, ids=lambda kind: kind.name)
def test_any_scale_is_exact_or_falls_back_to_float32(kind: Kind, tmp_path: Path) -> None:
    size = gguf.GGML_QUANT_SIZES[kind][1]
    raw = np.random.default_rng(1).integers(0, 256, (VOCAB, HIDDEN // 32, size), dtype=np.uint8)
    tiny = np.array([6e-8, -6e-8, 1e-7, 3e-5, 0.0, -0.0, 511.0, -511.0], np.float16)  # subnormal to large
    raw[..., :2] = np.resize(tiny, (VOCAB, HIDDEN // 32, 1)).view(np.uint8)
    if EXACT[kind] == 0:
        raw[..., 2:4] = np.resize(tiny[::-1], (VOCAB, HIDDEN // 32, 1)).view(np.uint8)
    raw = raw.reshape(VOCAB, -1)
    write_gguf(tmp_path / "small.gguf", kind=kind, tensors={"token_embd.weight": raw})
    small = read_gguf(tmp_path / "small.gguf").tensors["model.embed_tokens.weight"]
    assert isinstance(small, Quantized)
    np.testing.assert_array_equal(small.dequantize(), dequantize(raw, kind))

    large = raw.copy()
    large[3, :2] = np.array([30000.0], np.float16).view(np.uint8)
    write_gguf(tmp_path / "large.gguf", kind=kind, tensors={"token_embd.weight": large})
    read = read_gguf(tmp_path / "large.gguf").tensors["model.embed_tokens.weight"]
    assert isinstance(read, Quantized) == (EXACT[kind] == 0)  # 8 * 30000 is beyond float16
    np.testing.assert_array_equal(as_float(read), dequantize(large, kind))


# ---------------------------------------------------------------------------------------------- names and order


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_tensors_have_the_names_and_shapes_of_transformers(arch: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    write_gguf(tmp_path / "m.gguf", arch)
    checkpoint = read_gguf(tmp_path / "m.gguf")
    config = {key: value for key, value in checkpoint.config.items() if value is not None}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert {name: as_float(tensor).shape for name, tensor in checkpoint.tensors.items()} == expected
    assert len(checkpoint.tensors) == len(list(checkpoint.tensors))
    assert "model.norm.weight" in checkpoint.tensors
    assert "output_norm.weight" not in checkpoint.tensors
    with pytest.raises(KeyError):
        checkpoint.tensors["lm_head.weight"]


def test_llama_rows_give_the_attention_scores_that_the_file_means(tmp_path: Path) -> None:
    """Rotating neighbouring pairs of the file's rows scores as transformers' rotation of our rows does."""
    torch = pytest.importorskip("torch")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    stored = write_gguf(tmp_path / "m.gguf")
    tensors = read_gguf(tmp_path / "m.gguf").tensors
    x = np.random.default_rng(3).standard_normal((5, HIDDEN)).astype(np.float64) / 16
    angles = np.arange(5)[:, None] * 500000.0 ** (-np.arange(0, WIDTH, 2) / WIDTH)

    def rotate_pairs(name: str, heads: int) -> np.ndarray:
        rows = (x @ stored[name][0].astype(np.float64).T).reshape(5, heads, WIDTH // 2, 2)
        turned = (rows[..., 0] + 1j * rows[..., 1]) * np.exp(1j * angles)[:, None]
        return np.stack([turned.real, turned.imag], -1).reshape(5, heads, WIDTH)

    q, k = rotate_pairs("blk.0.attn_q.weight", HEADS), rotate_pairs("blk.0.attn_k.weight", KV_HEADS)
    expected = np.einsum("ihd,jhd->hij", q[:, ::2], k)

    def project(name: str, heads: int) -> Any:
        weight = torch.from_numpy(tensors[f"model.layers.0.self_attn.{name}.weight"]).double()
        return (torch.from_numpy(x) @ weight.T).reshape(1, 5, heads, WIDTH).transpose(1, 2)

    table = torch.from_numpy(np.concatenate([angles, angles], -1))[None]
    ours_q, ours_k = llama.apply_rotary_pos_emb(
        project("q_proj", HEADS), project("k_proj", KV_HEADS), table.cos(), table.sin()
    )
    scores = (ours_q[0, ::2] @ ours_k[0].transpose(1, 2)).numpy()
    np.testing.assert_allclose(scores, expected, atol=1e-9)


def test_qwen_rows_and_biases_keep_their_order(tmp_path: Path) -> None:
    for arch in ("qwen2", "qwen3"):
        stored = write_gguf(tmp_path / "m.gguf", arch)
        tensors = read_gguf(tmp_path / "m.gguf").tensors
        q = tensors["model.layers.0.self_attn.q_proj.weight"]
        np.testing.assert_array_equal(q, stored["blk.0.attn_q.weight"][0])
        if arch == "qwen2":
            bias = tensors["model.layers.0.self_attn.q_proj.bias"]
            np.testing.assert_array_equal(bias, stored["blk.0.attn_q.bias"][0])


def test_llama_biases_are_permuted_like_their_rows(tmp_path: Path) -> None:
    bias = np.arange(HEADS * WIDTH, dtype=np.float32)
    names = {f"blk.{i}.attn_q.bias": bias for i in range(LAYERS)}
    write_gguf(tmp_path / "m.gguf", tensors=dict(names))
    checkpoint = read_gguf(tmp_path / "m.gguf")
    np.testing.assert_array_equal(checkpoint.tensors["model.layers.1.self_attn.q_proj.bias"], to_halves(bias, HEADS))
    assert checkpoint.config["attention_bias"]


# ---------------------------------------------------------------------------------------------- configuration


def test_config_of_a_llama_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.Q8.gguf")
    checkpoint = read_gguf(tmp_path / "tiny.Q8.gguf")
    assert checkpoint.name == "tiny.Q8"
    assert dict(checkpoint.config) == {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": WIDTH,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "max_position_embeddings": 128,
        "sliding_window": None,
        "vocab_size": VOCAB,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "eos_token_id": 2,
    }


def test_an_output_matrix_unties_the_head(tmp_path: Path) -> None:
    head = np.ones((VOCAB, HIDDEN), np.float32)
    write_gguf(tmp_path / "m.gguf", tensors={"output.weight": head})
    checkpoint = read_gguf(tmp_path / "m.gguf")
    assert checkpoint.config["tie_word_embeddings"] is False
    np.testing.assert_array_equal(checkpoint.tensors["lm_head.weight"], head)


def test_head_width_may_differ_from_hidden_size_over_heads(tmp_path: Path) -> None:
    q = np.ones((2 * WIDTH, HIDDEN), np.float32)
    o = np.ones((HIDDEN, 2 * WIDTH), np.float32)
    matrices = {f"blk.{i}.{n}.weight": w for i in range(LAYERS) for n, w in (("attn_q", q), ("attn_output", o))}
    value = gguf.GGUFValueType.UINT32
    fields = {"qwen3.attention.head_count": (2, value), "qwen3.attention.key_length": (WIDTH, value)}
    write_gguf(tmp_path / "m.gguf", "qwen3", tensors=dict(matrices), fields=dict(fields))
    config = read_gguf(tmp_path / "m.gguf").config
    assert (config["head_dim"], config["num_attention_heads"]) == (WIDTH, 2)


def test_rope_scaling(tmp_path: Path) -> None:
    text, real, whole = gguf.GGUFValueType.STRING, gguf.GGUFValueType.FLOAT32, gguf.GGUFValueType.UINT32

    def scaling_of(arch: str = "llama", **fields: Any) -> Any:
        named = {f"{arch}.rope.{key.replace('__', '.')}": value for key, value in fields.items()}
        write_gguf(tmp_path / "m.gguf", arch, fields=named)
        return read_gguf(tmp_path / "m.gguf").config["rope_scaling"]

    assert scaling_of(scaling__type=("none", text)) is None
    assert scaling_of(scale_linear=(4.0, real)) == {"rope_type": "linear", "factor": 4.0}
    linear = scaling_of(scaling__type=("linear", text), scaling__factor=(2.5, real))
    assert linear == {"rope_type": "linear", "factor": 2.5}
    yarn = {"scaling__type": ("yarn", text), "scaling__factor": (4.0, real)}
    yarn |= {"scaling__original_context_length": (32, whole)}
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert scaling_of("qwen2", **yarn) == expected
    more = {"scaling__yarn_beta_fast": (16.0, real), "scaling__attn_factor": (2.0, real)}
    assert scaling_of("qwen2", **yarn, **more) == expected | {
        "beta_fast": 16.0,
        "attention_factor": pytest.approx(2 * (1 + 0.1 * np.log(4))),
    }
    with pytest.raises(CheckpointError, match="'longrope'; supported are none, linear, yarn"):
        scaling_of(scaling__type=("longrope", text))


def test_llama3_frequency_factors(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, WIDTH // 2, dtype=np.float32)
    write_gguf(tmp_path / "m.gguf", tensors={"rope_freqs.weight": factors})
    checkpoint = read_gguf(tmp_path / "m.gguf")
    assert checkpoint.config["rope_freq_factors"] == factors.tolist()
    assert not [name for name in checkpoint.tensors if "rope" in name]
    write_gguf(tmp_path / "m.gguf", tensors={"rope_freqs.weight": factors[1:]})
    with pytest.raises(CheckpointError, match="has 31 factors, not 32"):
        read_gguf(tmp_path / "m.gguf")


def test_a_window_makes_a_llama_file_a_mistral(tmp_path: Path) -> None:
    fields = {"llama.attention.sliding_window": (64, gguf.GGUFValueType.UINT32)}
    write_gguf(tmp_path / "m.gguf", fields=dict(fields))
    checkpoint = read_gguf(tmp_path / "m.gguf")
    assert (checkpoint.config["model_type"], checkpoint.config["sliding_window"]) == ("mistral", 64)
    q = as_float(checkpoint.tensors["model.layers.0.self_attn.q_proj.weight"])
    stored = write_gguf(tmp_path / "plain.gguf")
    np.testing.assert_array_equal(q, to_halves(stored["blk.0.attn_q.weight"][0], HEADS))


# ---------------------------------------------------------------------------------------------- tokenizer


def test_tokenizer_fields_and_end_tokens(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    checkpoint = read_gguf(tmp_path / "m.gguf")
    data = checkpoint.tokenizer
    assert data is not None
    assert data.gguf is not None
    assert data.json is None
    assert data.gguf["model"] == "llama"
    assert (data.gguf["tokens"], data.gguf["token_type"]) == (TOKENS, TYPES)
    assert data.gguf["scores"] == [float(-i) for i in range(VOCAB)]
    assert data.chat_template == "{{ messages }}"
    # eos and eot as named; <|im_end|> by its text; <|eot_id|> is no control token here
    assert checkpoint.end_token_ids == (2, 5, 3)


def test_a_file_without_a_tokenizer(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tokenizer=False)
    checkpoint = read_gguf(tmp_path / "m.gguf")
    assert checkpoint.tokenizer is None
    assert checkpoint.end_token_ids == ()


# ---------------------------------------------------------------------------------------------- bad files


def expect_error(path: Path, pattern: str) -> None:
    with pytest.raises(CheckpointError, match=pattern) as caught:
        read_gguf(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", kind=Kind.Q8_0)
    data = (tmp_path / "m.gguf").read_bytes()
    rng = random.Random(5)
    header = 4000
    lengths = [*range(4, header, 37), *(rng.randrange(header, len(data)) for _ in range(20)), len(data) - 33]
    for length in lengths:
        (tmp_path / "cut.gguf").write_bytes(data[:length])
        expect_error(tmp_path / "cut.gguf", r"truncated \(\d+ bytes\); download it again")


def refusal(path: Path) -> str:
    try:
        read_gguf(path).tensors["model.layers.0.self_attn.q_proj.weight"]
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_damaged_header_never_escapes_as_another_exception(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", kind=Kind.Q4_0)
    data = (tmp_path / "m.gguf").read_bytes()
    rng = random.Random(11)
    num_refused = 0
    for _ in range(400):
        damaged = bytearray(data)
        for _ in range(rng.choice([1, 1, 4])):
            damaged[rng.randrange(4, 4000)] = rng.choice([0, 1, 2, 4, 8, 9, 255, rng.randrange(256)])
        (tmp_path / "damaged.gguf").write_bytes(damaged)
        message = refusal(tmp_path / "damaged.gguf")
        num_refused += bool(message)
        assert "\n" not in message
    assert num_refused > 100


def test_what_is_no_gguf_file(tmp_path: Path) -> None:
    expect_error(tmp_path / "none.gguf", "there is no such file; check the path")
    (tmp_path / "folder.gguf").mkdir()
    expect_error(tmp_path / "folder.gguf", "give a readable .gguf file")
    for content in (b"", b"GG", b"PK\x03\x04" + bytes(100)):
        (tmp_path / "m.gguf").write_bytes(content)
        expect_error(tmp_path / "m.gguf", "is not a GGUF file")
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<I", 1) + bytes(64))
    expect_error(tmp_path / "m.gguf", "version 1 is not supported")
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack(">I", 3) + bytes(64))
    expect_error(tmp_path / "m.gguf", "big-endian")


def test_an_unsupported_architecture_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "gemma2")
    expect_error(tmp_path / "m.gguf", r"architecture 'gemma2' is not supported; supported are llama, qwen2, qwen3\.")


def test_an_unsupported_tensor_type_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", kind=Kind.IQ4_NL)
    expect_error(tmp_path / "m.gguf", "has type IQ4_NL, which is not supported; take a file with types out of F32")


def test_what_a_plain_decoder_does_not_have(tmp_path: Path) -> None:
    value = gguf.GGUFValueType
    router = np.ones((8, HIDDEN), np.float32)
    write_gguf(tmp_path / "m.gguf", tensors={"blk.0.ffn_gate_inp.weight": router})
    expect_error(tmp_path / "m.gguf", "blk.0.ffn_gate_inp.weight has no place .* mixture of experts")
    write_gguf(tmp_path / "m.gguf", tensors={"blk.1.ffn_up.weight": None})
    expect_error(tmp_path / "m.gguf", "it holds no tensor blk.1.ffn_up.weight")
    write_gguf(tmp_path / "m.gguf", tensors={"token_embd.weight": None})
    expect_error(tmp_path / "m.gguf", "it holds no tensor token_embd.weight")
    write_gguf(tmp_path / "m.gguf", tensors={"blk.1.ffn_up.weight": router})
    expect_error(tmp_path / "m.gguf", r"blk.1.ffn_up.weight has shape \[8, 256\] where \[512, 256\] is expected")
    write_gguf(tmp_path / "m.gguf", fields={"llama.rope.dimension_count": (32, value.UINT32)})
    expect_error(tmp_path / "m.gguf", "llama.rope.dimension_count is 32; only the head width 64 is supported")
    write_gguf(tmp_path / "m.gguf", fields={"llama.block_count": (None, None)})
    expect_error(tmp_path / "m.gguf", "it has no field llama.block_count")
    write_gguf(tmp_path / "m.gguf", fields={"split.count": (2, value.UINT16)})
    expect_error(tmp_path / "m.gguf", "one part of a split model; merge the parts")


# ---------------------------------------------------------------------------------------------- cost


def test_opening_a_file_imports_nothing_heavy(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", kind=Kind.Q4_1)
    code = (
        "import sys; from pathlib import Path; from sakiyomi.checkpoints.gguf import read_gguf\n"
        f"c = read_gguf(Path({str(tmp_path / 'm.gguf')!r})); [c.tensors[name] for name in c.tensors]\n"
        "assert not {'gguf', 'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_real_file(model_path: Path) -> None:
    checkpoint = read_gguf(model_path)
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(model_path).tensors}
    config = checkpoint.config
    assert (config["vocab_size"], config["hidden_size"], config["num_hidden_layers"]) == (49152, 576, 30)
    assert checkpoint.end_token_ids == (2, 0)
    k = reader["blk.29.attn_k.weight"]
    ours = checkpoint.tensors["model.layers.29.self_attn.k_proj.weight"]
    expected = to_halves(dequantize(k.data, k.tensor_type), config["num_key_value_heads"])
    np.testing.assert_array_equal(as_float(ours), expected)
