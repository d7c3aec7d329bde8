"""rejection: the token rule of speculative sampling. It keeps the distribution, not the tokens.

Accept a drafted token x with probability min(1, p(x) / q(x)); at the first rejection draw from (p - q)+ instead, and
behind a fully accepted chain from p (Leviathan, Kalman and Matias, 2023; Chen et al., 2023, who write p and q the
other way round).
"""

from __future__ import annotations

from dataclasses import dataclass

from sakiyomi.noise import Randomness
from sakiyomi.sampling.distributions import (
    KeyedRandomness,
    TargetLaws,
    accept_path,
    draft_law,
    follow_choices,
    is_accepted,
    is_decided_by_choice,
    require_chain,
)
from sakiyomi.tree import Draft
from sakiyomi.types import DrawMode, Lossless, Output, Sequence, Verdict, Verifier


class RejectionVerifier(Verifier):
    """Judges the tokens of a sampled chain one by one."""

    is_lossless: Lossless = "distribution"
    draw: DrawMode = "independent"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """`rejection` has no options."""

    def __init__(self, config: Config | None = None, randomness: Randomness | None = None) -> None:
        self.config = config or self.Config()
        self.randomness = randomness or KeyedRandomness()

    def verify(self, draft: Draft, output: Output, sequence: Sequence) -> Verdict:
        if is_decided_by_choice(draft, sequence, "rejection"):
            return follow_choices(draft, output, sequence)
        require_chain(draft, "rejection")
        laws = TargetLaws(draft, output, sequence)
        for node, token in enumerate(draft.tokens):
            p = laws.after(node - 1)
            q = draft_law(draft, node, p.vocab_size)
            if not is_accepted(self.randomness, sequence, node, p.probability(token), q.probability(token)):
                rest, _ = p.residual(q)
                return accept_path(draft, tuple(range(node)), rest.draw(self.randomness, sequence, node - 1))
        last = len(draft) - 1
        return accept_path(draft, tuple(range(len(draft))), laws.after(last).draw(self.randomness, sequence, last))
