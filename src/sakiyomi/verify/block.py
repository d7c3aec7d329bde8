"""block: block verification. It keeps the distribution and accepts at least as much as `rejection`.

The prefixes of a sampled chain are judged jointly, so that a token that is likelier under the target than under the
drafter makes up for one before it (Sun, Mendlovic, Leviathan, Aharoni, Ro, Beirami and Suresh, 2025, "Block
verification accelerates speculative decoding").
"""

from __future__ import annotations

from dataclasses import dataclass

from sakiyomi.noise import Randomness
from sakiyomi.sampling.distributions import (
    KeyedRandomness,
    Law,
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


class BlockVerifier(Verifier):
    """Keeps the longest prefix of a sampled chain whose coin says so."""

    is_lossless: Lossless = "distribution"
    draw: DrawMode = "independent"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """`block` has no options."""

    def __init__(self, config: Config | None = None, randomness: Randomness | None = None) -> None:
        self.config = config or self.Config()
        self.randomness = randomness or KeyedRandomness()

    def verify(self, draft: Draft, output: Output, sequence: Sequence) -> Verdict:
        if is_decided_by_choice(draft, sequence, "block"):
            return follow_choices(draft, output, sequence)
        require_chain(draft, "block")
        laws = TargetLaws(draft, output, sequence)
        ratios = joint_ratios(draft, laws)
        # Each prefix has a coin of its own, and the longest success counts: a failure in between does not.
        for length in range(len(ratios) - 1, 0, -1):
            p, accept, reject = self._weigh(draft, laws, length, ratios[length])
            if is_accepted(self.randomness, sequence, length - 1, accept, accept + reject):
                return accept_path(draft, tuple(range(length)), p.draw(self.randomness, sequence, length - 1))
        p, _, _ = self._weigh(draft, laws, 0, 1.0)
        return accept_path(draft, (), p.draw(self.randomness, sequence, -1))

    def _weigh(self, draft: Draft, laws: TargetLaws, length: int, ratio: float) -> tuple[Law, float, float]:
        """The law of the token behind the first `length` ones, and the odds of stopping there, nothing longer kept."""
        p = laws.after(length - 1)
        if length == len(draft):
            return p, ratio, 1.0 - ratio
        rest, mass = p.residual(draft_law(draft, length, p.vocab_size), ratio)
        # sum (q - ratio p)+ = mass + 1 - ratio; where both are 0 the two laws agree and so does every longer prefix.
        return (rest, 1.0, 0.0) if ratio == 1 else (rest, mass, 1.0 - ratio)


def joint_ratios(draft: Draft, laws: TargetLaws) -> list[float]:
    """P_0 = 1, P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i)), clipped at each step, as far as it is above 0.

    P_i is the probability that at least i of the drawn tokens are kept.
    """
    ratios = [1.0]
    for node, token in enumerate(draft.tokens):
        p = laws.after(node - 1)
        q = draft_law(draft, node, p.vocab_size)
        ratio = min(1.0, ratios[-1] * p.probability(token) / q.probability(token))
        if ratio <= 0:
            break
        ratios.append(ratio)
    return ratios
