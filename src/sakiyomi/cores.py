"""How many threads of arithmetic this process can really run at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def count_cores(root: Path = Path("/")) -> int:
    """Physical cores that this process may use; at least 1.

    Hardware threads of one core share its arithmetic units and count once. CPUs that the process is not bound to do not
    count; nor does what exceeds the CPU time that its control groups grant, rounded down (Linux, versions 1 and 2).

    Args:
        root: where the kernel's files are looked up.
    """
    try:
        allowed = sorted(os.sched_getaffinity(0))
    except AttributeError:  # no Linux
        return os.cpu_count() or 1
    cores = {_read_siblings(root, cpu) or str(cpu) for cpu in allowed}
    return max(1, min([len(cores), *(int(quota) for quota in _quotas(root))]))


def _read_siblings(root: Path, cpu: int) -> str | None:
    """The CPUs that share a core with this one, as the kernel writes them."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    return _read(topology / "core_cpus_list") or _read(topology / "thread_siblings_list")


def _quotas(root: Path) -> Iterator[float]:
    """CPUs granted by each control group that this process is in, parents included."""
    mount = root / "sys/fs/cgroup"
    for line in (_read(root / "proc/self/cgroup") or "0::/\n1:cpu:/").splitlines():
        number, controllers, path = line.split(":", 2)
        folders = [PurePosixPath(path), *PurePosixPath(path).parents]
        if number == "0":  # version 2
            for folder in folders:
                yield from _read_quota(_read(mount / _relative(folder) / "cpu.max"))
        elif "cpu" in controllers.split(","):
            for folder in folders:
                here = mount / "cpu" / _relative(folder)
                yield from _read_quota(f"{_read(here / 'cpu.cfs_quota_us')} {_read(here / 'cpu.cfs_period_us')}")


def _relative(folder: PurePosixPath) -> PurePosixPath:
    """In a container the path may be the host's: its folders are then absent, and the root is the container's own."""
    return folder.relative_to("/") if folder.is_absolute() else folder


def _read_quota(text: str | None) -> Iterator[float]:
    """The quota of "microseconds period"; nothing where there is no limit."""
    words = (text or "").split()
    if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal() and int(words[1]) > 0:
        yield int(words[0]) / int(words[1])


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
