"""What the file formats share: JSON whose values are checked, and tensors of safetensors files."""

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
from sakiyomi.types import Tensor

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

# ---------------------------------------------------------------------------------------------- kinds of values


@dataclass(frozen=True)
class Kind:
    """What a key of a JSON file may hold beside null; `fits` may fail on what it does not expect."""

    words: str
    fits: Callable[[Any], bool]


def is_text(value: Any) -> bool:
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def is_integer(value: Any) -> bool:
    return type(value) is int


def is_list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


TEXT = Kind("a text", is_text)
INTEGER = Kind("a whole number", is_integer)
NUMBER = Kind("a number", lambda value: type(value) in (int, float))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
TEXTS = Kind("a list of texts", is_list_of(is_text))
IDS = Kind("a token id or a list of them", lambda value: is_integer(value) or is_list_of(is_integer)(value))

ENTRY_KINDS = {
    "dtype": TEXT,
    "shape": Kind(
        f"a list of {MAX_DIMS} whole numbers at most",
        lambda value: is_list_of(is_integer)(value) and len(value) <= MAX_DIMS,
    ),
    "data_offsets": Kind("two whole numbers", lambda value: is_list_of(is_integer)(value) and len(value) == 2),
}
INDEX_KINDS = {"weight_map": Kind("an object of file names", lambda value: is_list_of(is_text)(list(value.values())))}


# ---------------------------------------------------------------------------------------------- weights


class SafetensorsFolder(Mapping[str, Tensor]):
    """Names of all tensors in a folder's safetensors files to arrays, each read anew when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._entries: dict[str, _Entry] = {}
        for path in weight_files(folder):
            self._entries |= _read_header(path)
        index = folder / INDEX_NAME
        if not (folder / WEIGHTS_NAME).exists():
            for name in read_json(index, INDEX_KINDS)["weight_map"]:
                if name not in self._entries:
                    raise CheckpointError(f"{index} lists tensor {name}, but no shard holds it; fetch the model again.")

    @classmethod
    def of(cls, path: Path) -> SafetensorsFolder:
        """The tensors of one file."""
        one = cls.__new__(cls)
        one._entries = _read_header(path)
        return one

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


def weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS_NAME).exists():
        return [folder / WEIGHTS_NAME]
    if not (folder / INDEX_NAME).exists():
        found = ", ".join(sorted(path.name for path in folder.glob("*.bin"))) or "neither"
        raise CheckpointError(
            f"{folder} needs {WEIGHTS_NAME} or {INDEX_NAME} but holds {found}; fetch the model in safetensors format."
        )
    names = set((read_json(folder / INDEX_NAME, INDEX_KINDS).get("weight_map") or {}).values())
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


# ---------------------------------------------------------------------------------------------- JSON


def read_json(path: Path, kinds: Mapping[str, Kind]) -> dict[str, Any]:
    """The object in a file, with the keys that we read of the right kind or null."""
    text = read_text(path)
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


def read_optional_json(path: Path, kinds: Mapping[str, Kind]) -> dict[str, Any]:
    return read_json(path, kinds) if path.exists() else {}


def read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{path} is not UTF-8 text; fetch the model again.") from None


def _check_kinds(path: Path, content: Mapping[str, Any], kinds: Mapping[str, Kind]) -> None:
    for key, kind in kinds.items():
        value = content.get(key)
        if value is not None and not _fits(kind, value):
            raise CheckpointError(
                f"{path}: {key} is {reprlib.repr(value)}; it must be {kind.words}; fetch the model again."
            )


def _fits(kind: Kind, value: Any) -> bool:
    try:
        return kind.fits(value)
    except (TypeError, LookupError, AttributeError):
        return False
