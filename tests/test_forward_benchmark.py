"""benchmarks/forward.py on a tiny model: what it measures, how it takes turns with a peer, what it concludes."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("sakiyomi._native", reason="the native kernels are not built")

from sakiyomi.assemble import ModelOptions, load_model

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "forward.py"
FAKE_PEER = """#!{python}
import json, sys
print(json.dumps({facts}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    answer = {{"unsupported": "no"}} if request["do"] == "prompt" else {{"seconds": [1.0] * request.get("repeats", 1)}}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture(scope="module")
def forward() -> ModuleType:
    spec = importlib.util.spec_from_file_location("forward_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["forward_benchmark"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def ours(forward: ModuleType, write_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_llama(tmp_path_factory.mktemp("model"), vocab_size=257)
    forward.make_ids = lambda count: [i % 200 for i in range(count)]
    return forward.Ours(load_model(str(folder), ModelOptions(threads=2)))


def make_peer(forward: ModuleType, folder: Path, facts: dict[str, str]) -> Any:
    interpreter = folder / "interpreter"
    interpreter.write_text(FAKE_PEER.format(python=sys.executable, facts=facts))
    interpreter.chmod(0o755)
    return forward.PeerProcess("llama-cpp", "Q8_0", str(interpreter), folder / "model.gguf", 1, folder)


def test_a_whole_run(forward: ModuleType, ours: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = forward.Plan(
        (1, 4), (16,), prompts=(8,), first=20, tokens=6, rounds=2, repeats=2, batch_tokens=2, starts=1, long_context=32
    )
    peer = make_peer(forward, tmp_path, {"engine": "fake"})
    try:
        results = forward.measure(plan, ours, [peer], {"openvino int8": "absent"})
    finally:
        peer.close()
    assert {len(rounds) for rounds in results.times.rounds["sakiyomi"].values()} == {2}
    assert results.times.rounds["llama-cpp Q8_0"]["forward 4 at 16"] == [1.0, 1.0]
    assert "verify 4 at 16" in results.times.rounds["sakiyomi"]
    assert "verify 4 at 16" not in results.times.rounds["llama-cpp Q8_0"]
    assert "prompt 20" not in results.times.rounds["llama-cpp Q8_0"]
    assert set(results.profiles) == {"plain step", "1 at 16", "4 at 16", "1 at 32", "4 at 32", "8 at 32"}
    forward.show(plan, ours, results)
    printed = capsys.readouterr().out
    assert "absent" in printed
    assert "forward 4 at 16" in printed
    document = json.loads(json.dumps(forward.to_document(plan, ours, results)))
    assert [row["M"] for row in document["forward"]] == [1, 4]


def test_a_profile_accounts_for_the_whole_time(forward: ModuleType, ours: Any) -> None:
    ours.one_pass(8, 64)
    forward.native.start_profile()
    seconds = forward._timed(lambda: ours.one_pass(8, 64))
    assert forward._read_profile(seconds, ours.threads).total == pytest.approx(1000 * seconds)
    one = forward.profile(lambda: ours.one_pass(8, 64), ours.threads, 8)
    assert all(one.phases[name] > 0 for name in ("qkv", "attention", "output", "gate_up", "down", "head", "norm"))
    assert one.python > 0


def test_counted_work(ours: Any) -> None:
    num_bytes, operations = ours.count_work(3, 10)
    layer = 128 * 64 + 64 * 64 + 2 * 96 * 64 + 64 * 96
    assert operations == 2 * 3 * (2 * layer + 257 * 64)
    matrices = [(128, 64), (64, 64), (192, 64), (64, 96)] * 2 + [(272, 64)]  # 257 outputs fill 17 blocks of 16
    packed = sum(n * k + n * k // 32 * 4 for n, k in matrices)
    block = 32 * (32 + 4) + 32 * (32 + 4)  # bytes and a scale for each of 32 keys, then of 32 values
    assert num_bytes == packed + 2 * block


def test_limits_of_the_machine_are_measured(forward: ModuleType) -> None:
    meter = forward.MachineMeter(1 << 24, 2)
    meter.measure()
    machine = meter.result()
    assert min(machine.read_gb_s, machine.copy_gb_s, machine.int8_gop_s) > 0


def test_a_second_start_of_the_real_model_fits_its_memory(
    forward: ModuleType, model_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SAKIYOMI_CACHE", str(tmp_path))
    start = forward.measure_start(model_path, threads=2, repeats=1)
    assert len(list((tmp_path / "packed").iterdir())) == 1  # left by the first start, mapped by the second
    assert 0 < start.resident_mb <= start.peak_mb <= 350


def test_ratios_are_taken_within_a_round(forward: ModuleType) -> None:
    times = forward.Times()
    for ours, peer in ((1.0, 2.0), (10.0, 20.0), (1.0, 5.0)):
        times.add("sakiyomi", "task", [ours, ours + 1, ours])
        times.add("peer", "task", [peer])
    assert times.ratio(("peer", "task"), ("sakiyomi", "task")) == 2.0
    assert times.best_ratio(("peer", "task"), ("sakiyomi", "task")) == 2.0
    assert times.median("sakiyomi", "task") == 1.0
    assert times.ratio(("other", "task"), ("sakiyomi", "task")) is None


def test_a_check_says_whether_it_holds(forward: ModuleType) -> None:
    assert str(forward.Check("1", "speed", 2.5, 2.2, True)).endswith(">= 2.2    holds")
    assert str(forward.Check("2", "cost", 2.5, 2.2, False)).endswith("DOES NOT HOLD")
    assert str(forward.Check("2", "cost", None, 2.2, False)).endswith("not measured")


def test_a_peer_that_cannot_start_says_why(forward: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(forward.PeerError, match="no such engine"):
        make_peer(forward, tmp_path, {"error": "no such engine"})
    peers, failures = forward.start_peers([("llama-cpp", sys.executable)], tmp_path / "no.gguf", 1, tmp_path)
    assert peers == []
    assert set(failures) == {"llama-cpp Q8_0", "llama-cpp Q4_0", "llama-cpp file"}
