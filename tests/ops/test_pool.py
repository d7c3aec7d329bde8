"""The thread pool: forked children, other pools in the same process, concurrent callers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from sakiyomi.cores import count_cores
from sakiyomi.ops.native import NativeOps

FORK = """
import os, sys
import numpy as np
from sakiyomi.ops.native import NativeOps

rng = np.random.default_rng(0)
ops = NativeOps(threads=3)
weight = ops.weight(rng.standard_normal((900, 320)).astype(np.float32))
x = rng.standard_normal((9, 320)).astype(np.float32)
expected = ops.linear(x, weight).tobytes()
for generation in range(3):
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        assert ops.linear(x, weight).tobytes() == expected
        sys.exit(os.waitstatus_to_exitcode(status))
    assert ops.linear(x, weight).tobytes() == expected, "child"
os._exit(7)
"""

FORK_WHILE_BUSY = """
import os, sys, threading
import numpy as np
from sakiyomi.ops.native import NativeOps

rng = np.random.default_rng(0)
ops = NativeOps(threads=2)
weight = ops.weight(rng.standard_normal((900, 320)).astype(np.float32))
x = rng.standard_normal((9, 320)).astype(np.float32)
expected = ops.linear(x, weight).tobytes()
stop = threading.Event()

def work():
    while not stop.is_set():
        ops.linear(x, weight)

worker = threading.Thread(target=work)
worker.start()
for _ in range(20):
    pid = os.fork()
    if pid == 0:
        os._exit(0 if ops.linear(x, weight).tobytes() == expected else 1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
stop.set()
worker.join()
"""

BESIDE_OPENMP = """
import os, sys, threading, time
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])  # before a runtime counts the cores
import numpy as np
import torch
from sakiyomi.ops.native import NativeOps

torch.set_num_threads(2)
matrix = torch.rand(256, 256)
ops = NativeOps(threads=2)
weight = ops.weight(np.ones((4096, 2048), np.float32))
x = np.ones((1, 2048), np.float32)

def waste():
    # Processor time of a few products and long pauses: turning threads use it up in the pauses.
    torch.mm(matrix, matrix)
    before = time.process_time()
    for _ in range(5):
        torch.mm(matrix, matrix)
        time.sleep(0.02)
    return time.process_time() - before

def crowd():
    stop = threading.Event()
    worker = threading.Thread(target=lambda: [torch.mm(matrix, matrix) for _ in iter(stop.is_set, True)])
    worker.start()
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        ops.linear(x, weight)
    stop.set()
    worker.join()

turning = min(waste() for _ in range(3))
if turning < 0.01:
    sys.exit(3)
for _ in range(20):
    crowd()
    if waste() < turning / 4:
        sys.exit(7)
sys.exit(f"still turning: {turning:.4f} s before")
"""

# How often, of forty runs behind each of five pauses, the pool's thread ran on the core that the caller keeps to.
APART = """
import os, time
import numpy as np
from sakiyomi.ops.native import NativeOps

def core_of(thread):
    with open(f"/proc/self/task/{thread}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[36])

ops = NativeOps(threads=2)
weight = ops.weight(np.ones((4096, 2048), np.float32))
x = np.ones((1, 2048), np.float32)
before = set(os.listdir("/proc/self/task"))
ops.linear(x, weight)
(worker,) = set(os.listdir("/proc/self/task")) - before
core = min(os.sched_getaffinity(0))
os.sched_setaffinity(0, {core})
for _ in range(5):
    time.sleep(1)
    ops.linear(x, weight)
    together = 0
    for _ in range(40):
        ops.linear(x, weight)
        together += core_of(worker) == core
    print(together)
"""


@pytest.fixture
def case() -> tuple[Any, Any]:
    rng = np.random.default_rng(3)
    return rng.standard_normal((900, 320)).astype(np.float32), rng.standard_normal((9, 320)).astype(np.float32)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize(("script", "code"), [(FORK, 7), (FORK_WHILE_BUSY, 0)])
def test_forked_children_work(script: str, code: int) -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == code, result.stderr


two_cores = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or count_cores() < 2, reason="needs two cores of a Linux machine"
)


@two_cores
def test_threads_do_not_share_a_core_behind_a_pause() -> None:
    result = subprocess.run([sys.executable, "-c", APART], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    together = [int(line) for line in result.stdout.split()]
    assert len(together) == 5
    assert max(together) <= 4, together


@two_cores
def test_threads_with_fewer_cores_than_threads(case: tuple[Any, Any]) -> None:
    allowed = os.sched_getaffinity(0)
    ops = NativeOps(threads=3)
    weight = ops.weight(case[0])
    expected = ops.linear(case[1], weight).tobytes()
    try:
        for core in sorted(allowed)[:2] * 3:
            os.sched_setaffinity(0, {core})
            assert ops.linear(case[1], weight).tobytes() == expected
            assert os.sched_getaffinity(0) == {core}
    finally:
        os.sched_setaffinity(0, allowed)
    for _ in range(100):
        assert ops.linear(case[1], weight).tobytes() == expected
    assert os.sched_getaffinity(0) == allowed


@two_cores
def test_torch_stops_turning_once_threads_lack_cores() -> None:
    pytest.importorskip("torch")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    result = subprocess.run(
        [sys.executable, "-c", BESIDE_OPENMP], capture_output=True, text=True, timeout=120, env=kept
    )
    if result.returncode == 3:
        pytest.skip("this torch's threads do not turn while they wait")
    assert result.returncode == 7, result.stderr


def test_two_python_threads_share_one_ops(case: tuple[Any, Any]) -> None:
    ops = NativeOps(threads=2)
    weight = ops.weight(case[0])
    inputs = [case[1], case[1][:3] * 2, case[1][:1] - 1]
    expected = [ops.linear(x, weight).tobytes() for x in inputs]
    wrong: list[int] = []

    def work(which: int) -> None:
        for _ in range(300):
            if ops.linear(inputs[which], weight).tobytes() != expected[which]:
                wrong.append(which)

    workers = [threading.Thread(target=work, args=(which,)) for which in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
        assert not worker.is_alive()
    assert not wrong


def test_different_thread_counts_alternate(case: tuple[Any, Any]) -> None:
    many = [NativeOps(threads=threads) for threads in (1, 5, 2, 8, 3)]
    weight = many[0].weight(case[0])
    expected = many[0].linear(case[1], weight).tobytes()
    for _ in range(40):
        assert all(ops.linear(case[1], weight).tobytes() == expected for ops in many)


def test_torch_in_a_second_thread(case: tuple[Any, Any]) -> None:
    torch = pytest.importorskip("torch")
    ops = NativeOps(threads=2)
    weight = ops.weight(case[0])
    expected = ops.linear(case[1], weight).tobytes()
    stop, products = threading.Event(), [0]

    def multiply() -> None:
        torch.set_num_threads(2)
        matrix = torch.ones(400, 400)
        while not stop.is_set():
            torch.mm(matrix, matrix)
            products[0] += 1

    before = torch.get_num_threads()
    worker = threading.Thread(target=multiply)
    worker.start()
    try:
        count, end = 0, time.monotonic() + 2
        while time.monotonic() < end:
            assert ops.linear(case[1], weight).tobytes() == expected
            count += 1
    finally:
        stop.set()
        worker.join(timeout=60)
        torch.set_num_threads(before)
    # Neither side starves: even a crowded machine does far more than this in two seconds.
    assert count > 50
    assert products[0] > 20


def test_the_gil_is_free_during_work() -> None:
    ops = NativeOps(threads=1)
    rng = np.random.default_rng(0)
    # Long calls: on a busy machine a thread that may run still waits, and one that may not runs between two calls only.
    weight, x = ops.weight(rng.standard_normal((4000, 1024)).astype(np.float32)), np.ones((2000, 1024), np.float32)
    started, done = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        for _ in range(5):
            ops.linear(x, weight)
        done.set()

    worker = threading.Thread(target=work)
    worker.start()
    started.wait()
    ticks = 0
    while not done.is_set():
        time.sleep(0.001)
        ticks += 1
    worker.join()
    assert ticks > 10
