"""Our own drafter files: one safetensors file with the weights, and in its header what they belong to.

Every kind of trained drafter is stored this way. The header's metadata has one key, `sakiyomi`, a JSON object:

    kind              name of the drafter that reads the file ("mlp")
    config            numbers of its net
    taps              the target's layers whose hidden states it reads
    target            name, shape and fingerprint of the model it was trained for
    recipe, measured  how it was trained, and what it reached then

The draft vocabulary is the int32 tensor `vocabulary.ids`, ascending ids of the target. Matrices are float16, or 8-bit
in groups of 32 as three tensors (`.values`, `.scales`, `.mins`).
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from sakiyomi.errors import CheckpointError
from sakiyomi.types import DrafterFile, Quantized, Tensor

FORMAT = 1
KEY = "sakiyomi"
VOCABULARY = "vocabulary.ids"
_MAX_HEADER = 10_000_000
_PARTS = (".values", ".scales", ".mins")


def write_drafter(path: Path, drafter: DrafterFile) -> None:
    """Write a drafter file; it appears whole or not at all."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, tensor in sorted(drafter.tensors.items()):
        if isinstance(tensor, Quantized):
            arrays |= zip((name + part for part in _PARTS), (tensor.values, tensor.scales, tensor.mins), strict=True)
        else:
            arrays[name] = tensor
    if drafter.vocabulary is not None:
        arrays[VOCABULARY] = drafter.vocabulary.astype(np.int32)
    header = {
        "format": FORMAT,
        "kind": drafter.kind,
        "config": dict(drafter.config),
        "taps": list(drafter.taps),
        "target": dict(drafter.target),
        "recipe": dict(drafter.recipe or {}),
        "measured": dict(drafter.measured or {}),
    }
    data = save({name: np.ascontiguousarray(array) for name, array in arrays.items()}, {KEY: json.dumps(header)})
    working = path.with_name(path.name + ".part")
    with working.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    working.replace(path)


def read_drafter(path: Path) -> DrafterFile:
    """Read a drafter file.

    Raises:
        CheckpointError: no such file, a damaged one, or one that is no drafter of ours.
    """
    header = _read_header(path)
    try:
        arrays = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged ({_one_line(error)}); export or fetch the drafter again.") from error
    vocabulary = arrays.pop(VOCABULARY, None)
    try:
        return DrafterFile(
            kind=str(header["kind"]),
            config=dict(header["config"]),
            taps=tuple(int(tap) for tap in header["taps"]),
            target=dict(header["target"]),
            tensors=_join(arrays),
            vocabulary=None if vocabulary is None else vocabulary.astype(np.int32),
            recipe=dict(header.get("recipe") or {}),
            measured=dict(header.get("measured") or {}),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged ({_one_line(error)}); export or fetch the drafter again.") from error


def find_packaged(kind: str) -> Iterator[DrafterFile]:
    """The drafters of a kind that come with the package."""
    folder = Path(__file__).resolve().parent.parent / "assets"
    for path in sorted(folder.glob("*.safetensors")):
        if _read_header(path).get("kind") == kind:
            yield read_drafter(path)


def _read_header(path: Path) -> dict[str, Any]:
    """The JSON object of the file's metadata."""
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            text = json.loads(file.read(size)) if size <= _MAX_HEADER else {}
        header = json.loads(text["__metadata__"][KEY])
    except FileNotFoundError:
        raise CheckpointError(f"there is no drafter file {path}; check the path.") from None
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise CheckpointError(
            f"{path} is no drafter file of sakiyomi; give a .safetensors file that `sakiyomi train` wrote."
        ) from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        found = header.get("format") if isinstance(header, dict) else None
        raise CheckpointError(f"{path} has format {found!r} and this version reads {FORMAT}; update sakiyomi.")
    return header


def _join(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, array in arrays.items():
        base, dot, part = name.rpartition(".")
        if dot + part not in _PARTS:
            tensors[name] = array
        elif part == "values":
            tensors[base] = Quantized(array, arrays[base + ".scales"], arrays[base + ".mins"])
    return tensors


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
