"""Packed weights kept in the user's cache: found again, and never trusted when stale or damaged."""

from __future__ import annotations

import importlib.util
import mmap
import os
import subprocess
import sys
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
    monkeypatch.setenv("SAKIYOMI_STORAGE", "spans")
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights" * 1000)
    return path


def matrices() -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def quantized(highest: int) -> Quantized:
        scales = rng.uniform(0.01, 0.1, (40, 3)).astype(np.float16)
        values = rng.integers(0, highest + 1, (40, 96), dtype=np.uint8)
        return Quantized(values, scales, (-8 * scales).astype(np.float16))

    mins = (-rng.integers(128, 256, (48, 3)) / 128).astype(np.float16)
    scales = ((1 - mins.astype(np.float32)) / 15).astype(np.float16)
    spans = Quantized(rng.integers(0, 16, (48, 96), dtype=np.uint8), scales, mins)
    floats = rng.standard_normal((5, 7)).astype(np.float32)
    return {"four": quantized(15), "eight": quantized(255), "spans": spans, "floats": floats}


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
        if name == "spans":
            assert weight.storage == name
    if store is not None:
        store.save()
    return results


def run_again(model: Path, variant: str = "int8") -> tuple[dict[str, bytes], list[str]]:
    loads: list[str] = []
    return run(PackedFile.of([model], variant), loads), loads


def test_the_second_start_loads_nothing_and_computes_the_same_bits(model: Path) -> None:
    expected = run(None, [])
    assert run_again(model) == (expected, ["four", "eight", "spans", "floats"])
    assert run_again(model) == (expected, [])


def count_huge_bytes(name: str) -> int:
    """Bytes of files of this name that this process has mapped in huge pages."""
    total, is_it = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            is_it = line.endswith(name)
        elif is_it and line.startswith("FilePmdMapped:"):
            total += 1024 * int(line.split()[1])
    return total


def skip_without_huge_file_pages(folder: Path) -> None:
    path = folder / "probe.bin"
    with path.open("wb") as file:
        file.write(b"x" * (8 << 20))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        data.madvise(mmap.MADV_HUGEPAGE)
        assert sum(data[::4096]) > 0
        if count_huge_bytes("probe.bin") < 4 << 20:
            pytest.skip("this system keeps no files in huge pages (Linux does with some file systems)")


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="only Linux has huge pages for files")
def test_what_was_written_is_mapped_in_huge_pages(model: Path) -> None:
    skip_without_huge_file_pages(model.parent)
    values = np.arange(4096 * 4096, dtype=np.uint64).astype(np.uint8).reshape(4096, 4096)
    halves = np.ones((4096, 128), np.float16)
    store = PackedFile.of([model], "int8")
    assert store is not None
    NativeOps(threads=1, store=store).named_weight("a", lambda: Quantized(values, halves, halves))
    store.save()
    again = PackedFile.of([model], "int8")
    assert again is not None
    assert again.find("a") is not None
    assert count_huge_bytes(again.path.name) >= 0.7 * again.path.stat().st_size


def test_a_changed_model_or_another_variant_packs_anew(model: Path) -> None:
    run_again(model)
    assert run_again(model, "float32")[1] == ["four", "eight", "spans", "floats"]
    status = model.stat()
    model.write_bytes(b"weighty" * 1000)
    assert len(run_again(model)[1]) == len(matrices())
    os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert len(run_again(model)[1]) == len(matrices())
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
    assert run_again(model) == (expected, ["four", "eight", "spans", "floats"])
    assert run_again(model) == (expected, [])


def test_no_cache_where_nothing_can_be_written(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = model.parent / "file"
    blocked.write_text("")
    monkeypatch.setenv("SAKIYOMI_CACHE", str(blocked))
    assert len(run_again(model)[1]) == len(matrices())
    assert len(run_again(model)[1]) == len(matrices())


def test_small_models_are_not_kept(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_BYTES", 1 << 20)
    run_again(model)
    assert not (model.parent / "cache").exists()


def names_in_cache(model: Path) -> set[str]:
    return {path.name.split("-")[0] for path in (model.parent / "cache" / "packed").iterdir()}


def pack(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    run(PackedFile.of([path], "int8"), [])


def test_packing_another_model_removes_files_of_models_that_are_gone_or_replaced(model: Path) -> None:
    gone, replaced, other = (model.parent / f"{name}.gguf" for name in ("gone", "replaced", "other"))
    for path in (model, gone, replaced):
        pack(path, path.name.encode())
    assert names_in_cache(model) == {"model", "gone", "replaced"}
    gone.unlink()
    replaced.write_bytes(b"another model")
    pack(other, b"other")
    assert names_in_cache(model) == {"model", "other"}
    assert run_again(model)[1] == []


def test_a_sweep_removes_what_cannot_be_used_and_reports_it(model: Path) -> None:
    run_again(model)
    folder = model.parent / "cache" / "packed"
    (kept,) = folder.iterdir()
    content = kept.read_bytes()
    broken = {
        "empty.bin": b"",
        "text.bin": b"no packed weights at all, but longer than the fixed part of a header",
        "version.bin": content[:8] + b"\x09" + content[9:],
        "json.bin": content[:40] + b"!" + content[41:],
        "list.bin": module.PREFIX.pack(module.MAGIC, module.VERSION, 2, 0) + b"[]",
        "long.bin": module.PREFIX.pack(module.MAGIC, module.VERSION, 2**63, 0),
        ".packing-old": b"half a file",
    }
    for name, data in broken.items():
        (folder / name).write_bytes(data)
    (folder / ".packing-new").write_bytes(b"another process writes here")
    os.utime(folder / ".packing-old", (1e9, 1e9))
    removed = module.sweep()
    assert {path.name: size for path, size in removed} == {name: len(data) for name, data in broken.items()}
    assert set(folder.iterdir()) == {kept, folder / ".packing-new"}
    assert module.sweep() == []


def test_all_files_together_are_bounded_and_the_last_used_stay(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [model, *(model.parent / f"{name}.gguf" for name in ("a", "b"))]
    for path in models:
        pack(path, path.name.encode())
    files = {path.name.split("-")[0]: path for path in (model.parent / "cache" / "packed").iterdir()}
    for age, name in enumerate(("a", "model", "b")):
        os.utime(files[name], (files[name].stat().st_mtime - 100 * (age + 1),) * 2)
    assert run_again(model)[1] == []  # used: it is the newest now
    monkeypatch.setattr(module, "MAX_BYTES", 2 * files["a"].stat().st_size)
    assert [path for path, _ in module.sweep()] == [files["b"]]
    monkeypatch.setattr(module, "MAX_IDLE_SECONDS", 50)
    assert [path for path, _ in module.sweep()] == [files["a"]]
    assert run_again(model)[1] == []


def test_two_packers_of_one_model_do_not_disturb_each_other(model: Path) -> None:
    first, second = (PackedFile.of([model], "int8") for _ in range(2))
    expected = run(first, [])
    assert run(second, []) == expected
    mapped = PackedFile.of([model], "int8")
    third = PackedFile(mapped.path, "another source")  # type: ignore[union-attr]
    run(third, [])  # replaces the file that `mapped` holds
    assert run(mapped, []) == expected
    assert run_again(model) == (expected, ["four", "eight", "spans", "floats"])


PACKER = """
import sys
from pathlib import Path
import numpy as np
from sakiyomi.models import packed
from sakiyomi.ops.native import NativeOps

packed.MIN_BYTES = 0
model, expected = Path(sys.argv[1]), None
for turn in range(30):
    store = packed.PackedFile.of([model], "int8")
    ops = NativeOps(threads=1, store=store)
    matrix = np.random.default_rng(0).standard_normal((300, 320)).astype(np.float32)
    weight = ops.named_weight("one", lambda: matrix)
    result = ops.linear(np.ones((2, 320), np.float32), weight).tobytes()
    expected = expected or result
    assert result == expected, turn
    store.save()
    if turn % 3 == 2:
        store.path.unlink(missing_ok=True)
print(hash(expected.hex()))
"""


def test_two_processes_pack_at_once(model: Path) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-c", PACKER, str(model)]
    workers = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    results = [worker.communicate(timeout=60) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], results
    assert len({result[0] for result in results}) == 1
    assert not list((model.parent / "cache" / "packed").glob(".packing-*"))
