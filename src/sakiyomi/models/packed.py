"""A model's weights in the order in which the kernels read them, kept in the user's cache and memory-mapped.

Packing is done once per model file: the next start maps the result, and processes that run the same model share its
pages. A file that is stale, damaged or of another version counts as absent and is written anew; where nothing can be
written, every start packs for itself. Writing a file removes those that no model needs any more (`sweep`).

Layout: magic, version, length and checksum of the header; the header (JSON: what was packed, and the directory); then
each weight at a multiple of 4,096 bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sakiyomi.hub import cache_folder
from sakiyomi.ops.native import Packed, checksum

MAGIC = b"SAKIPACK"
VERSION = 3
PREFIX = struct.Struct("<8sQQQ")
ALIGNMENT = 4096
HEAD_BYTES = 1 << 16
MIN_BYTES = 16 << 20
"""Smaller models are packed in a moment and not kept."""
MAX_BYTES = 16 << 30
"""Of all packed files together; what was used longest ago goes first."""
MAX_IDLE_SECONDS = 90 * 24 * 3600
MAX_WORK_SECONDS = 3600
"""A file that is still being written after this time was left by an interrupted run."""
WORK_PREFIX = ".packing-"


class PackedFile:
    """Packed weights by name (`ops.native.WeightStore`).

    Args:
        path: the file in the cache; it may be absent.
        source: what the weights are made of; another source makes the file stale.
    """

    def __init__(self, path: Path, source: Any) -> None:
        self.path = path
        self._source = source
        self._found = _read(path, source)
        self._added: dict[str, Packed] = {}
        if self._found:
            with contextlib.suppress(OSError):
                os.utime(path)  # the last use, for `sweep`

    @classmethod
    def of(cls, files: Sequence[Path], variant: str) -> PackedFile | None:
        """The packed form of a model's files, or None where they cannot be identified.

        Args:
            variant: how the weights are packed (the working precision).
        """
        try:
            source = {"variant": variant, "files": [_identify(file) for file in files]}
        except OSError:
            return None
        names = "\n".join([variant, *(str(file.resolve()) for file in files)])
        digest = hashlib.sha256(names.encode()).hexdigest()[:16]
        return cls(_folder() / f"{files[0].stem}-{variant}-{digest}.bin", source)

    def find(self, name: str) -> Packed | None:
        return self._found.get(name)

    def add(self, name: str, packed: Packed) -> None:
        self._added[name] = packed

    def save(self) -> None:
        """Write all weights if any was added; a small model, or a folder that cannot be written, leaves no file."""
        weights = {**self._found, **self._added}
        if not self._added or sum(packed.data.size for packed in weights.values()) < MIN_BYTES:
            return
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _write(self.path, self._source, weights)
            sweep(keep=self.path)


def sweep(*, keep: Path | None = None) -> list[tuple[Path, int]]:
    """Remove the packed files in the user's cache that are of no use, and what interrupted runs left.

    Of no use are files of models that are gone or have changed, of another version, unused for 90 days, or beyond 16 GB
    in all. Processes that have such a file mapped are not disturbed.

    Args:
        keep: a file that stays.

    Returns:
        What was removed: paths and bytes.
    """
    removed, kept_bytes, now = [], 0, time.time()
    for path, status in _list_newest_first(_folder()):
        idle = now - status.st_mtime
        if path.name.startswith(WORK_PREFIX):
            is_useful = idle < MAX_WORK_SECONDS
        else:
            fits = kept_bytes + status.st_size <= MAX_BYTES
            is_useful = path == keep or (fits and idle < MAX_IDLE_SECONDS and _is_current(path))
        if is_useful:
            kept_bytes += status.st_size
            continue
        with contextlib.suppress(OSError):
            path.unlink()
            removed.append((path, status.st_size))
    return removed


def _folder() -> Path:
    return cache_folder() / "packed"


def _list_newest_first(folder: Path) -> list[tuple[Path, os.stat_result]]:
    found = []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):  # another process swept it meanwhile
                found.append((path, path.stat()))
    return sorted(found, key=lambda entry: entry[1].st_mtime, reverse=True)


def _is_current(path: Path) -> bool:
    """Whether a packed file's model is still what it was packed from."""
    try:
        with path.open("rb") as file:
            magic, version, length, _ = PREFIX.unpack(file.read(PREFIX.size))
            if magic != MAGIC or version != VERSION or length > path.stat().st_size:
                return False
            files = json.loads(file.read(length))["source"]["files"]
        return all(_identify(Path(file["path"])) == file for file in files)
    except (OSError, ValueError, LookupError, TypeError, struct.error):
        return False


def _identify(file: Path) -> dict[str, Any]:
    status = file.stat()
    with file.open("rb") as opened:
        head = hashlib.sha256(opened.read(HEAD_BYTES)).hexdigest()
    return {"path": str(file.resolve()), "bytes": status.st_size, "changed": status.st_mtime_ns, "head": head}


def _write(path: Path, source: Any, weights: dict[str, Packed]) -> None:
    entries: dict[str, dict[str, Any]] = {}
    offset = 0
    for name, packed in weights.items():
        size = packed.data.size
        entries[name] = {"storage": packed.storage, "shape": packed.shape, "offset": offset, "bytes": size}
        entries[name]["checksum"] = checksum(packed.data)
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    header = json.dumps({"source": source, "weights": entries}).encode()
    start = _data_start(len(header))
    handle, working = tempfile.mkstemp(prefix=WORK_PREFIX, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(PREFIX.pack(MAGIC, VERSION, len(header), _checksum_bytes(header)))
            file.write(header)
            for name, packed in weights.items():
                file.seek(start + entries[name]["offset"])
                packed.data.tofile(file)
            file.truncate(start + offset)
            _forget_pages(file)
        os.replace(working, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(working)
        raise


def _read(path: Path, source: Any) -> dict[str, Packed]:
    """The weights in a file, or none if it is absent, stale or damaged."""
    try:
        with path.open("rb") as file:
            data = _map_in_huge_pages(file)
        magic, version, length, expected = PREFIX.unpack_from(data)
        header = data[PREFIX.size : PREFIX.size + length]
        if magic != MAGIC or version != VERSION or _checksum_bytes(header) != expected:
            return {}
        content = json.loads(header)
        if content["source"] != source:
            return {}
        pages = np.frombuffer(data, np.uint8, offset=_data_start(length))
        weights = {}
        for name, entry in content["weights"].items():
            part = pages[entry["offset"] : entry["offset"] + entry["bytes"]]
            if part.size != entry["bytes"] or checksum(part) != entry["checksum"]:
                return {}
            weights[name] = Packed(entry["storage"], (entry["shape"][0], entry["shape"][1]), part)
    except (OSError, ValueError, struct.error):
        return {}
    return weights


def _map_in_huge_pages(file: BinaryIO) -> mmap.mmap:
    """A file for reading, in huge pages where the system has such for files: passes take a fifth less time."""
    data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            data.madvise(mmap.MADV_HUGEPAGE)
    return data


def _forget_pages(file: BinaryIO) -> None:
    """Take what was written out of memory, where it lies in small pages; `_map_in_huge_pages` reads it anew."""
    if hasattr(os, "posix_fadvise"):
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _data_start(header_bytes: int) -> int:
    return -(-(PREFIX.size + header_bytes) // ALIGNMENT) * ALIGNMENT


def _checksum_bytes(data: bytes) -> int:
    return checksum(np.frombuffer(data, np.uint8))
