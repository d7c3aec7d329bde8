"""Packed weights kept in the user's cache: found again, and never trusted when stale or damaged."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("sakiyomi._native") is None:
    pytest.skip("the native kernels are not built", allow_module_level=True)
from sakiyomi.models import packed as module
from sakiyomi.models.packed import PackedFile
from sakiyomi.ops.native import NativeOps
from sakiyomi.types import Quantized


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that stands for a model, with a cache folder of its own."""
    monkeypatch.setenv("SAKIYOMI_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "MIN_BYTES", 0)
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights" * 1000)
    return path


def matrices() -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def quantized(highest: int) -> Quantized:
        scales = rng.uniform(0.01, 0.1, (40, 3)).astype(np.float16)
        values = rng.integers(0, highest + 1, (40, 96), dtype=np.uint8)
        return Quantized(values, scales, (-8 * scales).astype(np.float16))

    return {"four": quantized(15), "eight": quantized(255), "floats": rng.standard_normal((5, 7)).astype(np.float32)}


def run(store: PackedFile | None, loads: list[str]) -> dict[str, bytes]:
    """Products with every matrix; `loads` collects the names that were not found."""
    ops = NativeOps(threads=1, store=store)
    results = {}
    for name, matrix in matrices().items():

        def load(name: str = name, matrix: Any = matrix) -> Any:
            loads.append(name)
            return matrix

        weight = ops.named_weight(name, load)
        x = np.random.default_rng(1).standard_normal((3, weight.shape[1])).astype(np.float32)
        results[name] = ops.linear(x, weight).tobytes() + ops.embed(weight, np.arange(4, dtype=np.int32)).tobytes()
    if store is not None:
        store.save()
    return results


def run_again(model: Path, variant: str = "int8") -> tuple[dict[str, bytes], list[str]]:
    loads: list[str] = []
    return run(PackedFile.of([model], variant), loads), loads


def test_the_second_start_loads_nothing_and_computes_the_same_bits(model: Path) -> None:
    expected = run(None, [])
    assert run_again(model) == (expected, ["four", "eight", "floats"])
    assert run_again(model) == (expected, [])


def test_a_changed_model_or_another_variant_packs_anew(model: Path) -> None:
    run_again(model)
    assert run_again(model, "float32")[1] == ["four", "eight", "floats"]
    status = model.stat()
    model.write_bytes(b"weighty" * 1000)
    assert len(run_again(model)[1]) == 3
    os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert len(run_again(model)[1]) == 3
    assert run_again(model)[1] == []


@pytest.mark.parametrize("damage", ["cut", "first", "header", "middle", "last", "empty", "version"])
def test_a_damaged_file_is_rebuilt(model: Path, damage: str) -> None:
    expected, _ = run_again(model)
    store = PackedFile.of([model], "int8")
    assert store is not None
    found = store.find("floats")
    assert found is not None
    content = bytearray(store.path.read_bytes())
    last = content.rindex(bytes(found.data)) + found.data.size - 1
    del store, found
    if damage == "cut":
        content = content[:-5000]
    elif damage == "empty":
        content = bytearray()
    else:
        content[{"first": 0, "version": 8, "header": 60, "middle": 9000, "last": last}[damage]] ^= 1
    path = next((model.parent / "cache" / "packed").iterdir())
    path.unlink()
    path.write_bytes(content)
    assert run_again(model) == (expected, ["four", "eight", "floats"])
    assert run_again(model) == (expected, [])


def test_no_cache_where_nothing_can_be_written(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = model.parent / "file"
    blocked.write_text("")
    monkeypatch.setenv("SAKIYOMI_CACHE", str(blocked))
    assert len(run_again(model)[1]) == 3
    assert len(run_again(model)[1]) == 3


def test_small_models_are_not_kept(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_BYTES", 1 << 20)
    run_again(model)
    assert not (model.parent / "cache").exists()
