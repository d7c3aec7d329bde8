"""Weights in torch's pickle files (.bin, .pt), as most published heads of 2024 and 2025 come; read through torch."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sakiyomi.errors import CheckpointError, MissingExtraError, advise_extra


def read_pickled(path: Path) -> Mapping[str, npt.NDArray[Any]]:
    """All tensors of a file. Only tensors are unpickled, never code.

    Raises:
        MissingExtraError: torch is not installed.
        CheckpointError: a file that is damaged, or holds other things than named tensors.
    """
    try:
        import torch
    except ImportError:
        raise MissingExtraError(
            f"{path} is a torch file, and torch is not installed: {advise_extra('torch')}."
        ) from None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path} cannot be read ({first[:150]}); fetch the drafter again.") from None
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise CheckpointError(f"{path} holds no plain table of tensors; export the drafter as safetensors.")
    return {str(name): _to_numpy(value) for name, value in content.items()}


def _to_numpy(tensor: Any) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    return np.ascontiguousarray(array)
