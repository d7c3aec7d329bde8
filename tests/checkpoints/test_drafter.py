"""Drafter files: what is written is read back, and what is no such file is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from sakiyomi.checkpoints.drafter import DrafterFile, read_drafter, write_drafter
from sakiyomi.errors import CheckpointError
from sakiyomi.ops.native import quantize
from sakiyomi.types import Quantized


def make(**more: object) -> DrafterFile:
    rng = np.random.default_rng(0)
    tensors = {
        "a.weight": rng.normal(0, 1, (8, 32)).astype(np.float16),
        "b.weight": quantize(rng.normal(0, 1, (8, 64)).astype(np.float32)),
        "norm": np.ones(8, np.float32),
    }
    fields = {
        "kind": "mlp",
        "config": {"hidden_size": 8, "eps": 1e-5},
        "taps": (1, 2),
        "target": {"name": "toy", "probe": [0.5]},
        "tensors": tensors,
        "vocabulary": np.array([1, 4, 7], np.int32),
        "recipe": {"seed": 3},
        "measured": {"hit": 0.5},
    }
    return DrafterFile(**(fields | more))


def test_a_drafter_survives_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    written = make()
    write_drafter(path, written)
    read = read_drafter(path)
    for field in ("kind", "config", "taps", "target", "recipe", "measured"):
        assert getattr(read, field) == getattr(written, field), field
    assert read.vocabulary is not None
    assert read.vocabulary.tolist() == [1, 4, 7]
    assert set(read.tensors) == set(written.tensors)
    for name, tensor in written.tensors.items():
        found = read.tensors[name]
        if isinstance(tensor, Quantized):
            assert isinstance(found, Quantized)
            assert np.array_equal(found.dequantize(), tensor.dequantize())
        else:
            assert found.dtype == tensor.dtype
            assert np.array_equal(found, tensor)
    assert [file.name for file in tmp_path.iterdir()] == ["one.safetensors"]


def test_the_same_drafter_is_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_drafter(tmp_path / name, make(vocabulary=None))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert read_drafter(tmp_path / "a").vocabulary is None


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(CheckpointError, match="no drafter file"):
        read_drafter(path)
    path.write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="is no drafter file"):
        read_drafter(path)
    save_file({"a": np.ones(2, np.float32)}, path)
    with pytest.raises(CheckpointError, match="is no drafter file"):
        read_drafter(path)
    save_file({"a": np.ones(2, np.float32)}, path, {"sakiyomi": json.dumps({"format": 99})})
    with pytest.raises(CheckpointError, match="format 99"):
        read_drafter(path)
    write_drafter(path, make())
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match="damaged"):
        read_drafter(path)
