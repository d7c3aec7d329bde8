"""Read a GGUF file: configuration, tensors and tokenizer in the form every other checkpoint has.

The layout is the public GGUF specification, versions 2 and 3. The header is parsed here because the gguf package
makes one Python object per token of the vocabulary, which takes seconds; its dequantization is used for K-quants.
"""

from __future__ import annotations

import math
import mmap
import reprlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from sakiyomi.errors import CheckpointError
from sakiyomi.types import GROUP_SIZE, Checkpoint, Quantized, Tensor, TokenizerData

ARCHITECTURES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class TensorKind:
    """A storage type: `num_bytes` hold `num_values` values."""

    name: str
    num_values: int
    num_bytes: int


KINDS = {
    0: TensorKind("F32", 1, 4),
    1: TensorKind("F16", 1, 2),
    2: TensorKind("Q4_0", 32, 18),
    3: TensorKind("Q4_1", 32, 20),
    6: TensorKind("Q5_0", 32, 22),
    7: TensorKind("Q5_1", 32, 24),
    8: TensorKind("Q8_0", 32, 34),
    10: TensorKind("Q2_K", 256, 84),
    11: TensorKind("Q3_K", 256, 110),
    12: TensorKind("Q4_K", 256, 144),
    13: TensorKind("Q5_K", 256, 176),
    14: TensorKind("Q6_K", 256, 210),
    30: TensorKind("BF16", 1, 2),
}

MODEL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"

# Texts that end an answer whatever the metadata say, as in llama.cpp; they count only as control tokens.
END_TOKENS = {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>", "<end_of_turn>"}
END_TOKENS |= {"<end_of_utterance>", "</s>", "<eos>", "<EOT>", "[EOT]", "[EOS]"}
CONTROL_TYPE = 3


def read_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file of a Llama, SmolLM2, Mistral, Qwen2 or Qwen3 model.

    Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 matrices come as `Quantized`, without loss; everything else, and blocks whose
    min does not fit float16, as float32 arrays. The file is memory-mapped and a tensor is decoded when asked for.
    The configuration holds transformers' keys; `rope_freq_factors` (a list of D / 2 numbers that divide the rotary
    frequencies) is there when the file carries them, as Llama 3.1 and later do.

    Raises:
        CheckpointError: the file is missing, is not GGUF, is truncated, or holds what is not supported.
    """
    path = Path(path)
    header = _Header(path, _map_file(path))
    architecture = header.fields.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{path}: architecture {reprlib.repr(architecture)} is not supported; "
            f"supported are {', '.join(ARCHITECTURES)}."
        )
    config = _read_config(header)
    tensors = _Tensors(header, _name_tensors(header, config))
    tokenizer = _read_tokenizer(header)
    return Checkpoint(
        name=path.stem,
        config=config,
        tensors=tensors,
        tokenizer=tokenizer,
        end_token_ids=_find_end_tokens(tokenizer),
        files=(path,),
    )


# ---------------------------------------------------------------------------------------------- the file's header


@dataclass(frozen=True)
class _Entry:
    """Where a tensor lies: `shape` as numpy has it (inputs last), `offset` from the start of the file."""

    kind: TensorKind
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


class _Header:
    """Metadata fields and the directory of tensors, every range checked against the file's size."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self._at = 4
        self._read_version()
        num_tensors, num_fields = self._unpack("<Q"), self._unpack("<Q")
        self.fields: dict[str, Any] = {}
        for _ in range(num_fields):
            key = self._read_name()
            self.fields[key] = self._read_value(self._unpack("<I"))
        if self.fields.get("split.count", 1) not in (0, 1):
            raise CheckpointError(f"{path}: is one part of a split model; merge the parts into one file first.")
        self.entries = self._read_directory(num_tensors)

    def _read_version(self) -> None:
        version = self._unpack("<I")
        if version in (2, 3):
            return
        if version & 0xFFFF == 0 and version:
            raise CheckpointError(f"{self.path}: is a big-endian GGUF file; convert the model to little-endian.")
        raise CheckpointError(f"{self.path}: GGUF version {version} is not supported; convert the model to version 3.")

    def _read_directory(self, num_tensors: int) -> dict[str, _Entry]:
        found: list[tuple[str, TensorKind, tuple[int, ...], int]] = []
        for _ in range(num_tensors):
            name = self._read_name()
            num_dims = self._unpack("<I")
            if num_dims > 4:
                self.damaged(f"tensor {name} has {num_dims} dimensions")
            shape = tuple(reversed([self._unpack("<Q") for _ in range(num_dims)]))
            found.append((name, self._find_kind(name, self._unpack("<I")), shape, self._unpack("<Q")))
        alignment = self.fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            self.damaged(f"the alignment is {reprlib.repr(alignment)}")
        start = -(-self._at // alignment) * alignment
        return {name: self._place(name, kind, shape, start + offset) for name, kind, shape, offset in found}

    def _find_kind(self, name: str, number: int) -> TensorKind:
        if number in KINDS:
            return KINDS[number]
        from gguf.constants import GGMLQuantizationType

        known = {int(kind): kind.name for kind in GGMLQuantizationType}
        if number not in known:
            self.damaged(f"tensor {name} has the unknown type number {number}")
        supported = ", ".join(kind.name for kind in KINDS.values())
        raise CheckpointError(
            f"{self.path}: tensor {name} has type {known[number]}, which is not supported; "
            f"take a file with types out of {supported}."
        )

    def _place(self, name: str, kind: TensorKind, shape: tuple[int, ...], offset: int) -> _Entry:
        if not shape or shape[-1] % kind.num_values:
            self.damaged(f"tensor {name} of type {kind.name} has shape {list(shape)}")
        num_bytes = math.prod(shape) // kind.num_values * kind.num_bytes
        if offset + num_bytes > len(self.data):
            self.truncated()
        return _Entry(kind, shape, offset, num_bytes)

    # ---- values

    def _unpack(self, code: str) -> Any:
        try:
            (value,) = struct.unpack_from(code, self.data, self._at)
        except struct.error:
            self.truncated()
        self._at += struct.calcsize(code)
        return value

    def _read_name(self) -> str:
        name = self._read_string()
        if len(name) > 1000 or not name.isprintable():
            self.damaged("a name in it is unreadable")
        return name

    def _read_string(self) -> str:
        return self._read_strings(1)[0]

    def _read_strings(self, count: int) -> list[str]:
        data, at, end = self.data, self._at, len(self.data)
        read_length = struct.Struct("<Q").unpack_from
        texts: list[str] = []
        for _ in range(count):
            if at + 8 > end:
                self.truncated()
            (length,) = read_length(data, at)
            at += 8 + length
            if at > end:
                self.truncated()
            texts.append(data[at - length : at].decode("utf-8", "replace"))
        self._at = at
        return texts

    def _read_value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._read_string()
        if kind == _ARRAY:
            return self._read_array()
        if kind not in _SCALARS:
            self.damaged(f"a metadata field has the unknown type number {kind}")
        return self._unpack(_SCALARS[kind])

    def _read_array(self) -> list[Any]:
        kind, count = self._unpack("<I"), self._unpack("<Q")
        if kind == _STRING:
            return self._read_strings(count)
        if kind == _ARRAY:
            return [self._read_array() for _ in range(count)]
        if kind not in _SCALARS:
            self.damaged(f"a metadata array has the unknown type number {kind}")
        dtype = np.dtype(_SCALARS[kind])
        if self._at + count * dtype.itemsize > len(self.data):
            self.truncated()
        values: list[Any] = np.frombuffer(self.data, dtype, count, self._at).tolist()
        self._at += count * dtype.itemsize
        return values

    def truncated(self) -> NoReturn:
        raise CheckpointError(f"{self.path}: the file is truncated ({len(self.data)} bytes); download it again.")

    def damaged(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: the file is damaged: {what}; download it again.")


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise CheckpointError(f"{path}: is not a GGUF file; give a .gguf file or a folder with config.json.")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no such file; check the path.") from None
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror or error}); give a readable .gguf file."
        ) from None


# ---------------------------------------------------------------------------------------------- configuration


def _read_config(header: _Header) -> dict[str, Any]:
    """The configuration with transformers' keys."""
    fields, entries = header.fields, header.entries
    architecture = fields["general.architecture"]
    reader = _Hyperparameters(header, architecture)
    hidden, heads = reader.integer("embedding_length"), reader.integer("attention.head_count")
    num_layers = reader.integer("block_count")
    if num_layers > len(entries):
        header.damaged(f"it claims {num_layers} layers and holds {len(entries)} tensors")
    head_dim = reader.integer("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if reader.integer(key, head_dim) != head_dim:
            reader.refuse(key, f"only the head width {head_dim} is supported")
    embedding = entries.get("token_embd.weight")
    if embedding is None:
        header.damaged("it holds no tensor token_embd.weight")
    config: dict[str, Any] = {
        "model_type": architecture,
        "hidden_size": hidden,
        "intermediate_size": reader.integer("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": reader.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": reader.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": reader.number("rope.freq_base", 10000.0),
        "rope_scaling": _read_rope_scaling(reader),
        "max_position_embeddings": reader.integer("context_length"),
        "sliding_window": reader.integer("attention.sliding_window", 0) or None,
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in entries,
        "attention_bias": "blk.0.attn_q.bias" in entries,
    }
    if architecture == "llama" and config["sliding_window"]:
        config["model_type"] = "mistral"
    for key in ("bos", "eos"):
        if (token_id := fields.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[f"{key}_token_id"] = token_id
    if ROPE_FACTORS in entries:
        factors = _decode(header, entries[ROPE_FACTORS])
        assert isinstance(factors, np.ndarray), "a vector is never held as Quantized"
        config["rope_freq_factors"] = factors.tolist()
        if len(config["rope_freq_factors"]) != head_dim // 2:
            header.damaged(f"{ROPE_FACTORS} has {len(config['rope_freq_factors'])} factors, not {head_dim // 2}")
    return config


class _Hyperparameters:
    """The fields under the architecture's prefix, with a type."""

    def __init__(self, header: _Header, prefix: str) -> None:
        self.header = header
        self.prefix = prefix

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, list) and value and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            self.refuse(key, "one non-negative whole number for all layers is supported")
        if value == 0 and default is None:
            self.refuse(key, "it must be positive")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(key, "a number is expected")
        # Shortest decimal of the float32, so that 1e-5 is 1e-5 as in a config.json.
        return float(str(np.float32(value)))

    def text(self, key: str, default: str) -> str:
        return str(self._get(key, default))

    def has(self, key: str) -> bool:
        return f"{self.prefix}.{key}" in self.header.fields

    def refuse(self, key: str, allowed: str) -> NoReturn:
        value = self.header.fields.get(f"{self.prefix}.{key}")
        raise CheckpointError(
            f"{self.header.path}: {self.prefix}.{key} is {reprlib.repr(value)}; {allowed}; "
            "take another file of the model."
        )

    def _get(self, key: str, default: Any) -> Any:
        value = self.header.fields.get(f"{self.prefix}.{key}", default)
        if value is None:
            self.header.damaged(f"it has no field {self.prefix}.{key}")
        return value


def _read_rope_scaling(reader: _Hyperparameters) -> dict[str, Any] | None:
    kind = reader.text("rope.scaling.type", "linear" if reader.has("rope.scale_linear") else "none")
    factor = reader.number("rope.scaling.factor", reader.number("rope.scale_linear", 1.0)) or 1.0
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        reader.refuse("rope.scaling.type", "supported are none, linear, yarn")
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": reader.integer(
            "rope.scaling.original_context_length", reader.integer("context_length")
        ),
    }
    for key, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if reader.has(f"rope.scaling.{key}"):
            scaling[ours] = reader.number(f"rope.scaling.{key}")
    extra = reader.number("rope.scaling.attn_factor", 1.0)
    if extra != 1.0:  # on top of YaRN's own factor there; the whole factor in a config.json
        scaling["attention_factor"] = extra * (0.1 * math.log(factor) + 1.0)
    return scaling


# ---------------------------------------------------------------------------------------------- tensors


@dataclass(frozen=True)
class _Source:
    """A tensor of the file under transformers' name; `num_heads` > 0 asks for the rotary order to be undone."""

    entry: _Entry
    num_heads: int = 0


class _Tensors(Mapping[str, Tensor]):
    """Tensors under transformers' names, decoded at each access."""

    def __init__(self, header: _Header, sources: dict[str, _Source]) -> None:
        self._header = header
        self._sources = sources

    def __getitem__(self, name: str) -> Tensor:
        source = self._sources[name]
        return _decode(self._header, source.entry, source.num_heads)

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


def _name_tensors(header: _Header, config: Mapping[str, Any]) -> dict[str, _Source]:
    """Transformers' name of every tensor; refuses unknown, missing and mis-shaped ones."""
    shapes = _list_shapes(header, config)
    optional = ("output.weight", ".bias")
    for name in shapes:
        if name not in header.entries and not name.endswith(optional):
            header.damaged(f"it holds no tensor {name}")
    sources: dict[str, _Source] = {}
    for name, entry in header.entries.items():
        if name == ROPE_FACTORS or name.endswith(".attn_rot_embd"):
            continue
        if name not in shapes:
            raise CheckpointError(
                f"{header.path}: tensor {name} has no place in a plain {config['model_type']} decoder "
                f"(a mixture of experts or another variant?); supported are {', '.join(ARCHITECTURES)}."
            )
        if entry.shape != shapes[name]:
            header.damaged(f"tensor {name} has shape {list(entry.shape)} where {list(shapes[name])} is expected")
        sources[_rename(name)] = _Source(entry, _count_interleaved_heads(name, config))
    return sources


def _list_shapes(header: _Header, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that the architecture may have, under GGUF's names."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    width = config["head_dim"]
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    layer = {
        "attn_norm.weight": (hidden,),
        "attn_q.weight": (queries, hidden),
        "attn_k.weight": (keys, hidden),
        "attn_v.weight": (keys, hidden),
        "attn_output.weight": (hidden, queries),
        "ffn_norm.weight": (hidden,),
        "ffn_gate.weight": (inner, hidden),
        "ffn_up.weight": (inner, hidden),
        "ffn_down.weight": (hidden, inner),
        "attn_q.bias": (queries,),
        "attn_k.bias": (keys,),
        "attn_v.bias": (keys,),
        "attn_output.bias": (hidden,),
    }
    if header.fields["general.architecture"] == "qwen3":
        layer |= {"attn_q_norm.weight": (width,), "attn_k_norm.weight": (width,)}
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocab, hidden),
        "output_norm.weight": (hidden,),
        "output.weight": (vocab, hidden),
    }
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"blk.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def _rename(name: str) -> str:
    if name in MODEL_TENSORS:
        return MODEL_TENSORS[name]
    _, index, part, suffix = name.split(".")
    return f"model.layers.{index}.{LAYER_TENSORS[part]}.{suffix}"


def _count_interleaved_heads(name: str, config: Mapping[str, Any]) -> int:
    """Heads of a q or k tensor whose rows GGUF keeps in pairs; only the llama family is stored so."""
    if config["model_type"] not in ("llama", "mistral"):
        return 0
    part = name.split(".")[2] if name.startswith("blk.") else ""
    return int({"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(part, 0))


def _decode(header: _Header, entry: _Entry, num_heads: int = 0) -> Tensor:
    data = np.frombuffer(header.data, np.uint8, entry.num_bytes, entry.offset)
    rows = data.reshape(entry.shape[0], -1) if len(entry.shape) > 1 or num_heads else data.reshape(1, -1)
    if num_heads:
        rows = rows[_halves_from_pairs(entry.shape[0], num_heads)]
    unpack = _UNPACKERS.get(entry.kind.name)
    if unpack is not None and len(entry.shape) == 2:
        quantized = unpack(rows.reshape(entry.shape[0], -1, entry.kind.num_bytes))
        if quantized is not None:
            return quantized
    return _to_float32(rows, entry.kind.name).reshape(entry.shape)


def _halves_from_pairs(num_rows: int, num_heads: int) -> npt.NDArray[np.intp]:
    """Index that brings a head's rows from rotary pairs (0, D/2, 1, D/2+1, ...) into two halves."""
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).ravel()


def _to_float32(rows: npt.NDArray[np.uint8], kind: str) -> npt.NDArray[np.float32]:
    rows = np.ascontiguousarray(rows)
    if kind == "F32":
        return np.array(rows.view("<f4"), np.float32)
    if kind == "F16":
        return rows.view("<f2").astype(np.float32)
    if kind == "BF16":
        return (rows.view("<u2").astype(np.uint32) << 16).view(np.float32)
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):
        return np.asarray(dequantize(rows, GGMLQuantizationType[kind]), np.float32)


# ---- blocks of 32: rows as [N, K / 32, bytes of a block] -> Quantized, or None where float16 cannot hold a min


def _unpack_q8_0(blocks: npt.NDArray[np.uint8]) -> Quantized | None:
    values = np.bitwise_xor(blocks[..., 2:], 0x80)  # int8 q as the unsigned q + 128
    return _shift(values, _read_half(blocks, 0), 128)


def _unpack_q4_0(blocks: npt.NDArray[np.uint8]) -> Quantized | None:
    return _shift(_read_nibbles(blocks[..., 2:]), _read_half(blocks, 0), 8)


def _unpack_q5_0(blocks: npt.NDArray[np.uint8]) -> Quantized | None:
    values = _read_nibbles(blocks[..., 6:]) | _read_fifth_bits(blocks[..., 2:6])
    return _shift(values, _read_half(blocks, 0), 16)


def _unpack_q4_1(blocks: npt.NDArray[np.uint8]) -> Quantized | None:
    return _flatten(_read_nibbles(blocks[..., 4:]), _read_half(blocks, 0), _read_half(blocks, 2))


def _unpack_q5_1(blocks: npt.NDArray[np.uint8]) -> Quantized | None:
    values = _read_nibbles(blocks[..., 8:]) | _read_fifth_bits(blocks[..., 4:8])
    return _flatten(values, _read_half(blocks, 0), _read_half(blocks, 2))


_UNPACKERS = {
    "Q8_0": _unpack_q8_0,
    "Q4_0": _unpack_q4_0,
    "Q4_1": _unpack_q4_1,
    "Q5_0": _unpack_q5_0,
    "Q5_1": _unpack_q5_1,
}


def _shift(values: npt.NDArray[np.uint8], scales: npt.NDArray[np.float16], zero: int) -> Quantized | None:
    """Values around `zero`: the min is -zero * scale, exact (a power of two) unless it overflows."""
    with np.errstate(over="ignore", invalid="ignore"):
        mins = scales * np.float16(-zero)
    return _flatten(values, scales, mins) if np.isfinite(mins).all() else None


def _flatten(
    values: npt.NDArray[np.uint8], scales: npt.NDArray[np.float16], mins: npt.NDArray[np.float16]
) -> Quantized:
    return Quantized(values.reshape(len(values), -1), scales, mins)


def _read_half(blocks: npt.NDArray[np.uint8], at: int) -> npt.NDArray[np.float16]:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")[..., 0].astype(np.float16)


def _read_nibbles(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    values = np.empty((*packed.shape[:-1], GROUP_SIZE), np.uint8)
    np.bitwise_and(packed, 0x0F, out=values[..., :16])
    np.right_shift(packed, 4, out=values[..., 16:])
    return values


def _read_fifth_bits(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return np.unpackbits(packed, axis=-1, bitorder="little") << np.uint8(4)


# ---------------------------------------------------------------------------------------------- tokenizer


def _read_tokenizer(header: _Header) -> TokenizerData | None:
    prefix = "tokenizer.ggml."
    ours = {key.removeprefix(prefix): value for key, value in header.fields.items() if key.startswith(prefix)}
    if "tokens" not in ours:
        return None
    for key, kind in (("tokens", str), ("merges", str), ("token_type", int), ("scores", float)):
        values = ours.get(key, [])
        if not isinstance(values, list) or not all(type(value) is kind for value in values[:1]):
            header.damaged(f"{prefix}{key} is {reprlib.repr(values)}")
        if key in ("token_type", "scores") and values and len(values) != len(ours["tokens"]):
            header.damaged(f"{prefix}{key} has {len(values)} entries for {len(ours['tokens'])} tokens")
    template = header.fields.get("tokenizer.chat_template")
    return TokenizerData(gguf=ours, chat_template=template if isinstance(template, str) else None)


def _find_end_tokens(tokenizer: TokenizerData | None) -> tuple[int, ...]:
    """End ids named by the metadata, then control tokens whose text says so; without repeats."""
    if tokenizer is None or tokenizer.gguf is None:
        return ()
    fields = tokenizer.gguf
    named = [fields.get(f"{key}_token_id") for key in ("eos", "eot", "eom")]
    ends = [token_id for token_id in named if isinstance(token_id, int)]
    for token_id, (text, kind) in enumerate(zip(fields["tokens"], fields.get("token_type", []), strict=False)):
        if kind == CONTROL_TYPE and text in END_TOKENS:
            ends.append(token_id)
    return tuple(dict.fromkeys(ends))
