"""Reading a transformers folder: config.json, safetensors in one file or in shards, the tokenizer's files."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sakiyomi.errors import CheckpointError
from sakiyomi.types import Checkpoint, Tensor, TokenizerData

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMS, MAX_LENGTH = 32, 2**62  # what numpy takes
# bfloat16 is read as its 16 bits: numpy has no such type.
DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip


def read_safetensors(folder: Path, *, weights: bool = True) -> Checkpoint:
    """Read a model folder as transformers writes it. Tensors are read from the disk when they are asked for.

    Half-precision tensors are returned in float32.

    Args:
        weights: False leaves the tensors, and every check of them, to whoever reads them in another way.

    Raises:
        CheckpointError: a missing, truncated or broken file, a missing shard, or weights in a quantised format.
    """
    folder = Path(folder)
    config = _read_json(folder / "config.json", CONFIG_KINDS if weights else GENERATION_KINDS)
    if weights and config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise CheckpointError(
            f"{folder} holds weights quantised by {method!r}, which is not supported; "
            "use the unquantised model or a GGUF file."
        )
    tokenizer = _read_tokenizer(folder)
    return Checkpoint(
        name=folder.resolve().name,
        config=config,
        tensors=SafetensorsFolder(folder) if weights else {},
        tokenizer=tokenizer,
        end_token_ids=_end_token_ids(folder, config, tokenizer),
        files=tuple(_weight_files(folder)) if weights else (),
    )


# ---------------------------------------------------------------------------------------------- kinds of values


@dataclass(frozen=True)
class _Kind:
    """What a key of a JSON file may hold beside null; `fits` may fail on what it does not expect."""

    words: str
    fits: Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _is_integer(value: Any) -> bool:
    return type(value) is int


def _is_token(value: Any) -> bool:
    return _is_text(value["content"] if isinstance(value, dict) else value)


def _is_list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _is_added_token(number: str, token: Any) -> bool:
    flags = ("special", "lstrip", "rstrip", "single_word", "normalized")
    is_flagged = all(isinstance(token.get(flag, False), bool) for flag in flags)
    return number.isdecimal() and len(number) < 10 and is_flagged and _is_text(token["content"])


TEXT = _Kind("a text", _is_text)
INTEGER = _Kind("a whole number", _is_integer)
NUMBER = _Kind("a number", lambda value: type(value) in (int, float))
FLAG = _Kind("true or false", lambda value: isinstance(value, bool))
OBJECT = _Kind("an object", lambda value: isinstance(value, dict))
TEXTS = _Kind("a list of texts", _is_list_of(_is_text))
IDS = _Kind("a token id or a list of them", lambda value: _is_integer(value) or _is_list_of(_is_integer)(value))
TOKEN = _Kind("a token, or an object with its content", _is_token)
TOKENS = _Kind(
    "a list or an object of tokens",
    lambda value: _is_list_of(_is_token)(list(value.values()) if isinstance(value, dict) else value),
)
ADDED_TOKENS = _Kind("an object of ids and tokens", lambda value: all(_is_added_token(*item) for item in value.items()))
TEMPLATE = _Kind(
    "a text, or a list of objects with name and template",
    lambda value: (
        _is_text(value) or _is_list_of(lambda one: _is_text(one["name"]) and _is_text(one["template"]))(value)
    ),
)

CONFIG_KINDS = {
    **dict.fromkeys(("model_type", "hidden_act"), TEXT),
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"), INTEGER),
    **dict.fromkeys(("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"), INTEGER),
    **dict.fromkeys(("sliding_window", "max_window_layers"), INTEGER),
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "partial_rotary_factor"), NUMBER),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"), FLAG),
    **dict.fromkeys(("rope_scaling", "rope_parameters", "quantization_config"), OBJECT),
    "layer_types": TEXTS,
    "eos_token_id": IDS,
}
GENERATION_KINDS = {"eos_token_id": IDS}
TOKENIZER_KINDS = {
    **{f"{role}_token": TOKEN for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")},
    **dict.fromkeys(("additional_special_tokens", "extra_special_tokens"), TOKENS),
    "added_tokens_decoder": ADDED_TOKENS,
    "chat_template": TEMPLATE,
}
ENTRY_KINDS = {
    "dtype": TEXT,
    "shape": _Kind(
        f"a list of {MAX_DIMS} whole numbers at most",
        lambda value: _is_list_of(_is_integer)(value) and len(value) <= MAX_DIMS,
    ),
    "data_offsets": _Kind("two whole numbers", lambda value: _is_list_of(_is_integer)(value) and len(value) == 2),
}
INDEX_KINDS = {
    "weight_map": _Kind("an object of file names", lambda value: _is_list_of(_is_text)(list(value.values())))
}


def _check_kinds(path: Path, content: Mapping[str, Any], kinds: Mapping[str, _Kind]) -> None:
    for key, kind in kinds.items():
        value = content.get(key)
        if value is not None and not _fits(kind, value):
            raise CheckpointError(
                f"{path}: {key} is {reprlib.repr(value)}; it must be {kind.words}; fetch the model again."
            )


def _fits(kind: _Kind, value: Any) -> bool:
    try:
        return kind.fits(value)
    except (TypeError, LookupError, AttributeError):
        return False


# ---------------------------------------------------------------------------------------------- weights


class SafetensorsFolder(Mapping[str, Tensor]):
    """Names of all tensors in a folder's safetensors files to arrays, each read anew when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._entries: dict[str, _Entry] = {}
        for path in _weight_files(folder):
            self._entries |= _read_header(path)
        index = folder / INDEX_NAME
        if not (folder / WEIGHTS_NAME).exists():
            for name in _read_json(index, INDEX_KINDS)["weight_map"]:
                if name not in self._entries:
                    raise CheckpointError(f"{index} lists tensor {name}, but no shard holds it; fetch the model again.")

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._entries[name].read()

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a tensor lies."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def read(self) -> npt.NDArray[Any]:
        count = math.prod(self.shape)
        try:
            values: npt.NDArray[Any] = np.fromfile(self.path, DTYPES[self.dtype], count, offset=self.offset)
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path}: {error.strerror or error}.") from None
        if len(values) != count:
            raise CheckpointError(f"{self.path} became shorter while it was read; fetch the model again.")
        if self.dtype == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        elif self.dtype == "F16":
            values = values.astype(np.float32)
        return values.reshape(self.shape)


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS_NAME).exists():
        return [folder / WEIGHTS_NAME]
    if not (folder / INDEX_NAME).exists():
        found = ", ".join(sorted(path.name for path in folder.glob("*.bin"))) or "neither"
        raise CheckpointError(
            f"{folder} needs {WEIGHTS_NAME} or {INDEX_NAME} but holds {found}; fetch the model in safetensors format."
        )
    names = set((_read_json(folder / INDEX_NAME, INDEX_KINDS).get("weight_map") or {}).values())
    if not names:
        raise CheckpointError(f"{folder / INDEX_NAME} has no weight_map; fetch the model again.")
    files = [folder / name for name in sorted(names)]
    for path in files:
        if not path.exists():
            raise CheckpointError(f"shard {path} is missing ({len(files)} are listed); fetch the model again.")
    return files


def _read_header(path: Path) -> dict[str, _Entry]:
    """The tensors of one file: 8 bytes of header length, a JSON header, then the data."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            if size < 8 or not 0 < header_size <= min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(f"{path} is truncated or not a safetensors file; fetch the model again.")
            header = json.loads(file.read(header_size))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}.") from None
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has a broken header; fetch the model again.")
    header.pop("__metadata__", None)
    return {name: _check_entry(path, name, entry, 8 + header_size, size) for name, entry in header.items()}


def _check_entry(path: Path, name: str, entry: Any, data_start: int, size: int) -> _Entry:
    for key, kind in ENTRY_KINDS.items():
        if not isinstance(entry, dict) or not _fits(kind, entry.get(key)):
            raise CheckpointError(
                f"{path} describes tensor {name} wrongly: {key} must be {kind.words}; fetch the model again."
            )
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    start, stop = entry["data_offsets"]
    if dtype not in DTYPES:
        raise CheckpointError(f"tensor {name} in {path} is of type {dtype}; supported are {', '.join(DTYPES)}.")
    num_bytes = math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
    if min(shape, default=0) < 0 or max(shape, default=0) > MAX_LENGTH or start < 0 or stop - start != num_bytes:
        raise CheckpointError(
            f"tensor {name} in {path} has shape {list(shape)}, which is {num_bytes} bytes of {dtype}, "
            f"but the file gives it {stop - start}; fetch the model again."
        )
    if data_start + stop > size:
        raise CheckpointError(
            f"{path} is truncated: {size} bytes, but tensor {name} ends at {data_start + stop}; fetch the model again."
        )
    return _Entry(path, dtype, shape, data_start + start)


# ---------------------------------------------------------------------------------------------- other files


def _read_json(path: Path, kinds: Mapping[str, _Kind]) -> dict[str, Any]:
    """The object in a file, with the keys that we read of the right kind or null."""
    text = _read_text(path)
    if text is None:
        raise CheckpointError(f"{path} is missing; give a folder that holds a transformers model.")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); fetch the model again.") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds {type(content).__name__}, not a JSON object; fetch the model again.")
    _check_kinds(path, content, kinds)
    return content


def _read_optional_json(path: Path, kinds: Mapping[str, _Kind]) -> dict[str, Any]:
    return _read_json(path, kinds) if path.exists() else {}


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{path} is not UTF-8 text; fetch the model again.") from None


def _read_tokenizer(folder: Path) -> TokenizerData | None:
    text = _read_text(folder / "tokenizer.json")
    if text is None:
        return None
    # Older folders name the special tokens in a file of their own.
    names = ("special_tokens_map.json", "tokenizer_config.json")
    first, second = (_read_optional_json(folder / name, TOKENIZER_KINDS) for name in names)
    config = first | second
    template = _read_text(folder / "chat_template.jinja")
    return TokenizerData(json=text, config=config, chat_template=template or _configured_template(config))


def _configured_template(config: Mapping[str, Any]) -> str | None:
    """The template of a tokenizer_config.json: one text, or several named ones of which "default" counts."""
    template = config.get("chat_template")
    named = template if isinstance(template, list) else [{"name": "default", "template": template}]
    return {entry["name"]: entry["template"] for entry in named}.get("default")


def _end_token_ids(folder: Path, config: Mapping[str, Any], tokenizer: TokenizerData | None) -> tuple[int, ...]:
    """Every id at which the files say that generation ends, without repetition."""
    found: list[int] = []
    for source in (_read_optional_json(folder / "generation_config.json", GENERATION_KINDS), config):
        ids = source.get("eos_token_id")
        found += ids if isinstance(ids, list) else [] if ids is None else [ids]
    if tokenizer is not None:
        found += _tokenizer_end_ids(folder / "tokenizer.json", tokenizer)
    return tuple(dict.fromkeys(token_id for token_id in found if token_id >= 0))  # some write -1 for none


def _tokenizer_end_ids(path: Path, tokenizer: TokenizerData) -> list[int]:
    token = tokenizer.config.get("eos_token")
    if isinstance(token, dict):
        token = token["content"]
    if token is None:
        return []
    content = _read_json(path, {})
    try:
        added = {entry["content"]: entry["id"] for entry in content.get("added_tokens") or ()}
        vocabulary = content["model"]["vocab"]
    except (TypeError, LookupError, AttributeError) as error:
        raise CheckpointError(f"{path} has no readable added_tokens and model; fetch the model again.") from error
    known = added if token in added or not isinstance(vocabulary, dict) else vocabulary
    if token in known and not _is_integer(known[token]):
        raise CheckpointError(
            f"{path}: the id of {token!r} is {reprlib.repr(known[token])}; it must be {INTEGER.words}; "
            "fetch the model again."
        )
    return [known[token]] if token in known else []
