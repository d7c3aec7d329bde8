"""What `sakiyomi tune` found out about a model on this machine, kept in the user's cache beside its packed weights."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sakiyomi.errors import DownloadError
from sakiyomi.hub import cache_folder

VERSION = 1


def save_choices(model: Path, variant: str, choices: Mapping[str, Mapping[str, Any]]) -> Path:
    """Keep what was chosen for a model; other choices for it stay.

    Args:
        model: the model's file or folder.
        variant: how it is run (backend and precision), since what pays depends on it.
        choices: by the drafter's name.

    Raises:
        DownloadError: a cache folder that cannot be written.
    """
    path = _path_of(model, variant)
    content = {"version": VERSION, "source": _identify(model), "choices": {**load_choices(model, variant), **choices}}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, working = tempfile.mkstemp(prefix=".tuning-", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1)
            os.replace(working, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(working)
            raise
    except OSError as error:
        raise DownloadError(
            f"cannot keep the choice in {path.parent} ({error.strerror or error}); set SAKIYOMI_CACHE to a folder that "
            "you may write to."
        ) from error
    return path


def load_choices(model: Path, variant: str) -> dict[str, dict[str, Any]]:
    """What was chosen for a model, by the drafter's name; nothing where it was never tuned, or its files changed."""
    try:
        content = json.loads(_path_of(model, variant).read_text("utf-8"))
        if content["version"] == VERSION and content["source"] == _identify(model):
            choices: dict[str, dict[str, Any]] = content["choices"]
            return choices
    except (OSError, ValueError, LookupError, TypeError, DownloadError):
        pass
    return {}


def _path_of(model: Path, variant: str) -> Path:
    digest = hashlib.sha256(f"{variant}\n{model.resolve()}".encode()).hexdigest()[:16]
    return cache_folder() / "tuned" / f"{model.stem}-{digest}.json"


def _identify(model: Path) -> list[list[Any]]:
    """Names, sizes and times of the files that hold the model."""
    files = sorted(model.glob("*.safetensors")) + [model / "config.json"] if model.is_dir() else [model]
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
