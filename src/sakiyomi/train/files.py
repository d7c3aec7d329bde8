"""Files that are whole or absent: written beside their place, then moved there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import lzma
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sakiyomi.errors import CheckpointError, ParameterError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of `path` when the block ends well and vanishes otherwise.

    Raises:
        ParameterError: the disk is full or the folder cannot be written; what was there before is untouched.
    """
    working: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        os.close(handle)
        working = Path(name)
        yield working
        with working.open("rb+") as file:
            os.fsync(file.fileno())
        os.chmod(working, 0o644)
        os.replace(working, path)
    except OSError as error:
        raise ParameterError(
            f"cannot write {path} ({error.strerror or error}); what was finished before is kept: make room or choose "
            "another folder, and run the same command again."
        ) from error
    finally:
        if working is not None:
            with contextlib.suppress(OSError):
                working.unlink()


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a mapping as JSON, the same bytes for the same content."""
    with replacing(path) as working:
        working.write_text(json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any] | None:
    """What `write_json` wrote, or None where there is no such file.

    Raises:
        CheckpointError: the file cannot be read as JSON.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); delete it and run the stage again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object; delete it and run the stage again.")
    return content


def write_arrays(path: Path, arrays: Mapping[str, npt.NDArray[Any]], about: Mapping[str, Any]) -> None:
    """Write arrays and a JSON header as one safetensors file, the same bytes for the same content.

    A path that ends in .xz is compressed (slowly; meant for token ids of two bytes).
    """
    from safetensors.numpy import save

    plain = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    data = save(plain, {"about": json.dumps(about, sort_keys=True)})
    if path.suffix == ".xz":
        data = lzma.compress(data, lzma.FORMAT_XZ, filters=_FILTERS)
    with replacing(path) as working:
        working.write_bytes(data)


def read_arrays(path: Path) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """What `write_arrays` wrote.

    Raises:
        CheckpointError: a file that is absent, cut short or of another kind.
    """
    try:
        data = path.read_bytes()
        if path.suffix == ".xz":
            data = lzma.decompress(data, lzma.FORMAT_XZ)
        return _split(np.frombuffer(data, np.uint8))
    except (OSError, lzma.LZMAError, KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); delete it and run the stage again.") from error


def map_arrays(path: Path) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """What `write_arrays` wrote uncompressed, as read-only views of the file: pages are read when they are touched.

    Raises:
        CheckpointError: a file that is absent, cut short or of another kind.
    """
    try:
        return _split(np.memmap(path, np.uint8, mode="r"))
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); delete it and run the stage again.") from error


def _split(data: npt.NDArray[np.uint8]) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """Arrays and header of a safetensors file."""
    size = int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8 : 8 + size].tobytes())
    about = json.loads(header.pop("__metadata__")["about"])
    return {name: _view(data[8 + size :], entry) for name, entry in header.items()}, about


def _view(data: npt.NDArray[np.uint8], entry: Mapping[str, Any]) -> npt.NDArray[Any]:
    start, stop = entry["data_offsets"]
    view: npt.NDArray[Any] = data[start:stop].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return view


_DTYPES = {
    "F16": np.float16, "F32": np.float32, "I32": np.int32, "I64": np.int64, "BOOL": np.bool_, "U8": np.uint8,
    "U16": np.uint16, "U32": np.uint32, "U64": np.uint64,
}  # fmt: skip
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 0, "lp": 1, "pb": 1}]
"""For pairs of bytes."""


def hash_file(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def check_room(folder: Path, num_bytes: int, what: str) -> None:
    """Refuse to begin what will not fit on the disk.

    Raises:
        ParameterError: with what is needed and what is free.
    """
    parent = folder
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        raise ParameterError(
            f"{what} needs about {describe_bytes(num_bytes)}, but {folder} has {describe_bytes(free)} free; "
            "make room or choose another folder."
        )


def describe_bytes(num_bytes: float) -> str:
    """A size for a person."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{int(num_bytes)} bytes"


def describe_seconds(seconds: float) -> str:
    """A duration for a person."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 600:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
