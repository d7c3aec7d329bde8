"""What a stage will take, said before it begins."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sakiyomi.train.files import describe_bytes, describe_seconds


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Time, disk and memory of a stage from here on.

    Attributes:
        what: the work, for a person.
        seconds: of undisturbed work.
        disk_bytes: that it will add to the disk.
        memory_bytes: that it will hold beside the model.
    """

    what: str
    seconds: float
    disk_bytes: int
    memory_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.what}: about {describe_seconds(self.seconds)}, {describe_bytes(self.disk_bytes)} on disk, "
            f"{describe_bytes(self.memory_bytes)} of memory."
        )


Report = Callable[[str, int, int], None]
"""What is being done, how much of it is done, and how much it is in all."""
Announce = Callable[[Estimate], None]


def private_bytes() -> int:
    """What this process holds in memory that is no file's, or 0 where the system does not tell (only Linux does)."""
    try:
        _, resident, shared, *_ = Path("/proc/self/statm").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def say_nothing(what: str, done: int, total: int) -> None:
    """A `Report` that nobody hears."""


def announce_nothing(estimate: Estimate) -> None:
    """An `Announce` that nobody hears."""
