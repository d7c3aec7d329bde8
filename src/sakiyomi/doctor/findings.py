"""What the doctor finds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong, or that may be.

    Attributes:
        part: of the checkpoint ("layer ids", "lm_head", ...).
        found, expected, remedy: what is there, what belongs there, and what to do; the latter two may be empty where
            `found` says it all.
        is_fault: False is a warning.
    """

    part: str
    found: str
    expected: str = ""
    remedy: str = ""
    is_fault: bool = True


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A reading of the checkpoint that differs from its own in one thing, and how it did on the same text.

    Attributes:
        mean_length: drafted tokens that were right before the first wrong one, on average.
        num_better, num_worse: starts at which it was right for longer, or less long, than the checkpoint's own reading.
    """

    part: str
    change: str
    mean_length: float
    num_better: int
    num_worse: int


@dataclass(frozen=True, kw_only=True)
class Probe:
    """How the drafter did at temperature 0.

    Attributes:
        num_tokens: emitted in the real loop.
        mean_acceptance_length, acceptance_per_position: as everywhere, the bonus token included in the former.
        num_starts: different places at which the drafter was asked, beside the loop.
        agreement: share of them at which its first token was the target's.
        chance: what two texts with these tokens in random order would agree.
        is_chance: whether `agreement` is not significantly above that.
        mean_length: as in `Trial`, of the checkpoint's own reading.
    """

    num_tokens: int
    mean_acceptance_length: float
    acceptance_per_position: tuple[float, ...]
    num_starts: int
    agreement: float
    chance: float
    is_chance: bool
    mean_length: float
    trials: tuple[Trial, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What `examine` returns.

    Attributes:
        summary: what kind of drafter this is, in a few words; None where it could not be read.
        probe: None where it could not be run.
    """

    checkpoint: str
    target: str
    summary: str | None
    findings: tuple[Finding, ...]
    probe: Probe | None

    @property
    def faults(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.is_fault]

    @property
    def warnings(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.is_fault]

    @property
    def is_healthy(self) -> bool:
        return not self.faults

    def to_json(self) -> dict[str, Any]:
        """One object."""
        return {"healthy": self.is_healthy, **asdict(self)}
