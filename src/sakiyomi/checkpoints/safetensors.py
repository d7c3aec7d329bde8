"""Reading a transformers folder: config.json, safetensors in one file or in shards, the tokenizer's files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
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
# bfloat16 is read as its 16 bits: numpy has no such type.
DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip


def read_safetensors(folder: Path) -> Checkpoint:
    """Read a model folder as transformers writes it. Tensors are read from the disk when they are asked for.

    Half-precision tensors are returned in float32.

    Raises:
        CheckpointError: a missing, truncated or broken file, a missing shard, or weights in a quantised format.
    """
    folder = Path(folder)
    config = _read_json(folder / "config.json")
    if config.get("quantization_config"):
        method = dict(config["quantization_config"]).get("quant_method", "unknown")
        raise CheckpointError(
            f"{folder} holds weights quantised by {method!r}, which is not supported; "
            "use the unquantised model or a GGUF file."
        )
    tokenizer = _read_tokenizer(folder)
    return Checkpoint(
        name=folder.resolve().name,
        config=config,
        tensors=SafetensorsFolder(folder),
        tokenizer=tokenizer,
        end_token_ids=_end_token_ids(folder, config, tokenizer),
        files=tuple(_weight_files(folder)),
    )


class SafetensorsFolder(Mapping[str, Tensor]):
    """Names of all tensors in a folder's safetensors files to arrays, each read anew when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._entries: dict[str, _Entry] = {}
        for path in _weight_files(folder):
            self._entries |= _read_header(path)
        index = folder / INDEX_NAME
        if not (folder / WEIGHTS_NAME).exists():
            for name in _read_json(index)["weight_map"]:
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


# ---------------------------------------------------------------------------------------------- weights


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS_NAME).exists():
        return [folder / WEIGHTS_NAME]
    if not (folder / INDEX_NAME).exists():
        found = ", ".join(sorted(path.name for path in folder.glob("*.bin"))) or "neither"
        raise CheckpointError(
            f"{folder} needs {WEIGHTS_NAME} or {INDEX_NAME} but holds {found}; fetch the model in safetensors format."
        )
    weight_map = _read_json(folder / INDEX_NAME).get("weight_map")
    names = set(weight_map.values()) if isinstance(weight_map, dict) else set()
    if not names or not all(isinstance(name, str) for name in names):
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
            header = dict(json.loads(file.read(header_size)))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}.") from None
    except (ValueError, TypeError):
        raise CheckpointError(f"{path} has a broken header; fetch the model again.") from None
    header.pop("__metadata__", None)
    return {name: _check_entry(path, name, entry, 8 + header_size, size) for name, entry in header.items()}


def _check_entry(path: Path, name: str, entry: Any, data_start: int, size: int) -> _Entry:
    try:
        dtype, shape = entry["dtype"], tuple(int(length) for length in entry["shape"])
        start, stop = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{path} describes tensor {name} wrongly; fetch the model again.") from None
    if dtype not in DTYPES:
        raise CheckpointError(f"tensor {name} in {path} is of type {dtype}; supported are {', '.join(DTYPES)}.")
    num_bytes = math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
    if min(shape, default=0) < 0 or start < 0 or stop - start != num_bytes:
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


def _read_json(path: Path) -> dict[str, Any]:
    text = _read_text(path)
    if text is None:
        raise CheckpointError(f"{path} is missing; give a folder that holds a transformers model.")
    try:
        content = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); fetch the model again.") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds {type(content).__name__}, not a JSON object; fetch the model again.")
    return content


def _read_optional_json(path: Path) -> dict[str, Any]:
    return _read_json(path) if path.exists() else {}


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
    config = _read_optional_json(folder / "special_tokens_map.json") | _read_optional_json(
        folder / "tokenizer_config.json"
    )
    template = _read_text(folder / "chat_template.jinja")
    return TokenizerData(json=text, config=config, chat_template=template or _configured_template(config))


def _configured_template(config: Mapping[str, Any]) -> str | None:
    """The template of a tokenizer_config.json: one text, or several named ones of which "default" counts."""
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    return template if isinstance(template, str) else None


def _end_token_ids(folder: Path, config: Mapping[str, Any], tokenizer: TokenizerData | None) -> tuple[int, ...]:
    """Every id at which the files say that generation ends, without repetition."""
    found: list[int] = []
    for source in (_read_optional_json(folder / "generation_config.json"), config):
        ids = source.get("eos_token_id")
        found += ids if isinstance(ids, list) else [] if ids is None else [ids]
    if tokenizer is not None:
        found += _tokenizer_end_ids(folder, tokenizer)
    return tuple(dict.fromkeys(found))


def _tokenizer_end_ids(folder: Path, tokenizer: TokenizerData) -> list[int]:
    token = tokenizer.config.get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if token is None:
        return []
    content = _read_json(folder / "tokenizer.json")
    added = {entry.get("content"): entry.get("id") for entry in content.get("added_tokens") or ()}
    vocabulary = content.get("model", {}).get("vocab", {})
    known = added if token in added or not isinstance(vocabulary, dict) else vocabulary
    return [known[token]] if token in known else []
