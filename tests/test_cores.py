"""Cores that a process may use: affinity, hardware threads and control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sakiyomi.cores import count_cores


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of a machine with four cores of two hardware threads each: CPUs 0 to 3, and 4 to 7 beside them."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    for cpu in range(8):
        write(tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list", f"{cpu % 4},{cpu % 4 + 4}\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_hardware_threads_of_a_core_count_once(machine: Path) -> None:
    assert count_cores(machine) == 4


@pytest.mark.parametrize(("allowed", "cores"), [({0, 4}, 1), ({0, 1, 4}, 2), ({6}, 1), ({2, 3, 4, 5}, 4)])
def test_affinity(machine: Path, monkeypatch: pytest.MonkeyPatch, allowed: set[int], cores: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed)
    assert count_cores(machine) == cores


def test_older_kernels_and_machines_without_a_topology(machine: Path) -> None:
    for cpu in range(8):
        topology = machine / f"sys/devices/system/cpu/cpu{cpu}/topology"
        (topology / "core_cpus_list").rename(topology / "thread_siblings_list")
    assert count_cores(machine) == 4
    assert count_cores(machine / "elsewhere") == 8


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 4), ("200000 100000", 2), ("150000 100000", 1), ("50000 100000", 1), ("x", 4)]
)
def test_quota_of_version_2(machine: Path, quota: str, cores: int) -> None:
    write(machine / "proc/self/cgroup", "0::/app/worker\n")
    write(machine / "sys/fs/cgroup/app/cpu.max", quota + "\n")
    write(machine / "sys/fs/cgroup/app/worker/cpu.max", "300000 100000\n")
    assert count_cores(machine) == min(3, cores)


@pytest.mark.parametrize(("quota", "cores"), [(-1, 4), (300_000, 3)])
def test_quota_of_version_1_in_a_container_with_the_path_of_its_host(machine: Path, quota: int, cores: int) -> None:
    write(machine / "proc/self/cgroup", "4:memory:/docker/a\n3:cpu,cpuacct:/docker/a\n0::/\n")
    write(machine / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", f"{quota}\n")
    write(machine / "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert count_cores(machine) == cores


def test_without_affinity_all_cpus_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert count_cores() == 6
