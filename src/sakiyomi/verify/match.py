"""match: choose each token as plain decoding does, and follow the draft while it guessed right.

Token-identical to plain decoding at every temperature, because the choice is a function of logits, history, seed and
position alone (sample-and-match with keyed Gumbel noise; Daliri, Musco and Suresh, 2024, for the coupling).
"""

from __future__ import annotations

from dataclasses import dataclass

from sakiyomi.sampling.distributions import follow_choices
from sakiyomi.tree import Draft
from sakiyomi.types import DrawMode, Lossless, Output, Sequence, Verdict, Verifier


class MatchVerifier(Verifier):
    """Accepts a drafted token exactly when plain decoding would have chosen it."""

    is_lossless: Lossless = "tokens"
    draw: DrawMode = "coupled"
    follows_choices = True

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """`match` has no options."""

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()

    def verify(self, draft: Draft, output: Output, sequence: Sequence) -> Verdict:
        return follow_choices(draft, output, sequence)
