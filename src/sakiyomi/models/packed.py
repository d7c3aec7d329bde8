"""A model's weights in the order in which the kernels read them, kept in the user's cache and memory-mapped.

Packing is done once per model file: the next start maps the result, and processes that run the same model share its
pages. A file that is stale, damaged or of another version counts as absent and is written anew; where nothing can be
written, every start packs for itself.

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sakiyomi.hub import cache_folder
from sakiyomi.ops.native import Packed, checksum

MAGIC = b"SAKIPACK"
VERSION = 1
PREFIX = struct.Struct("<8sQQQ")
ALIGNMENT = 4096
HEAD_BYTES = 1 << 16
MIN_BYTES = 16 << 20
"""Smaller models are packed in a moment and not kept."""


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
        return cls(cache_folder() / "packed" / f"{files[0].stem}-{variant}-{digest}.bin", source)

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


def _identify(file: Path) -> dict[str, Any]:
    status = file.stat()
    with file.open("rb") as opened:
        head = hashlib.sha256(opened.read(HEAD_BYTES)).hexdigest()
    return {"name": file.name, "bytes": status.st_size, "changed": status.st_mtime_ns, "head": head}


def _write(path: Path, source: Any, weights: dict[str, Packed]) -> None:
    entries: dict[str, dict[str, Any]] = {}
    offset = 0
    for name, packed in weights.items():
        size = packed.data.size
        entries[name] = {"bits": packed.bits, "shape": packed.shape, "offset": offset, "bytes": size}
        entries[name]["checksum"] = checksum(packed.data)
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    header = json.dumps({"source": source, "weights": entries}).encode()
    start = _data_start(len(header))
    handle, working = tempfile.mkstemp(prefix=".packing-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(PREFIX.pack(MAGIC, VERSION, len(header), _checksum_bytes(header)))
            file.write(header)
            for name, packed in weights.items():
                file.seek(start + entries[name]["offset"])
                packed.data.tofile(file)
            file.truncate(start + offset)
        os.replace(working, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(working)
        raise


def _read(path: Path, source: Any) -> dict[str, Packed]:
    """The weights in a file, or none if it is absent, stale or damaged."""
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
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
            weights[name] = Packed(entry["bits"], (entry["shape"][0], entry["shape"][1]), part)
    except (OSError, ValueError, struct.error):
        return {}
    return weights


def _data_start(header_bytes: int) -> int:
    return -(-(PREFIX.size + header_bytes) // ALIGNMENT) * ALIGNMENT


def _checksum_bytes(data: bytes) -> int:
    return checksum(np.frombuffer(data, np.uint8))
