"""Counting what speculation did, with vLLM's definitions."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from sakiyomi.decode import Step


@dataclass
class AcceptanceCounter:
    """Counts steps, drafted and accepted tokens of one or more sequences."""

    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_lossy_tokens: int = 0
    accepted_at: Counter[int] = field(default_factory=Counter)
    tried_at: Counter[int] = field(default_factory=Counter)

    def add(self, step: Step) -> None:
        self.num_steps += 1
        self.num_draft_tokens += step.num_draft
        self.num_accepted_tokens += step.num_accepted
        self.num_lossy_tokens += step.num_lossy
        for position in range(step.num_accepted):
            self.accepted_at[position] += 1
        for position in range(step.num_tried):
            self.tried_at[position] += 1

    def merge(self, other: AcceptanceCounter) -> None:
        self.num_steps += other.num_steps
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        self.num_lossy_tokens += other.num_lossy_tokens
        self.accepted_at.update(other.accepted_at)
        self.tried_at.update(other.tried_at)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per step: 1 + accepted / steps, the bonus token included."""
        return 1 + self.num_accepted_tokens / self.num_steps if self.num_steps else 1.0

    @property
    def acceptance_per_position(self) -> list[float]:
        """For each draft position the share of steps that accepted it."""
        return [self.accepted_at[i] / self.num_steps for i in range(max(self.accepted_at, default=-1) + 1)]

    @property
    def tried_per_position(self) -> list[float]:
        """For each draft position the share of steps that put it to the test."""
        return [self.tried_at[i] / self.num_steps for i in range(max(self.tried_at, default=-1) + 1)]
