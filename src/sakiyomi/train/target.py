"""Which target something was made for, so that a changed one is noticed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from sakiyomi.assemble import LoadedModel
from sakiyomi.errors import ParameterError

BLOCK = 1 << 16
NUM_BLOCKS = 64
"""Blocks of a file that count: a fine-tuned model differs in nearly every one of them."""


def identify_target(target: LoadedModel) -> dict[str, Any]:
    """What tells one target from another: its shape, its number format and a digest of its files."""
    info = target.model.info
    return {
        "name": info.name,
        "architecture": info.architecture,
        "vocab_size": info.vocab_size,
        "num_layers": info.num_layers,
        "hidden_size": info.hidden_size,
        "dtype": info.dtype,
        "digest": _digest(target.path),
    }


def check_target(found: dict[str, Any], target: dict[str, Any], what: str) -> None:
    """Refuse work that was made for another target.

    Raises:
        ParameterError: naming what differs.
    """
    different = [key for key in target if found.get(key) != target[key]]
    if different:
        key = next((key for key in different if key != "digest"), "digest")
        told = "its weights differ" if key == "digest" else f"{key} was {found.get(key)!r} and is {target[key]!r}"
        raise ParameterError(
            f"{what} was made for another target than {target['name']}: {told}; delete it or choose another --out."
        )


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors")) + sorted(path.glob("*.json"))
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name if path.is_dir() else ''} {size}\n".encode())
        with file.open("rb") as opened:
            for block in range(NUM_BLOCKS):
                opened.seek(max(size - BLOCK, 0) * block // (NUM_BLOCKS - 1))
                digest.update(opened.read(BLOCK))
    return digest.hexdigest()
