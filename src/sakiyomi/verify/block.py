"""block: block verification. It keeps the distribution and accepts at least as much as `rejection`.

The prefixes of a sampled chain are judged jointly, so that a token that is likelier under the target than under the
drafter makes up for one before it (Sun, Mendlovic, Leviathan, Aharoni, Ro, Beirami and Suresh, 2025, "Block
verification accelerates speculative decoding").
"""

from __future__ import annotations

from sakiyomi.sampling.distributions import (
    Law,
    SampledRule,
    TargetLaws,
    accept_path,
    is_accepted,
)
from sakiyomi.tree import Draft
from sakiyomi.types import Sequence, Verdict


class BlockVerifier(SampledRule):
    """Keeps the longest prefix of a sampled chain whose coin says so."""

    name = "block"
    needs_chain = True

    def judge(self, draft: Draft, laws: TargetLaws, sequence: Sequence) -> Verdict:
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
        rest, mass = p.residual(laws.drafted(length), ratio)
        # sum (q - ratio p)+ = mass + 1 - ratio; where both are 0 the two laws agree and so does every longer prefix.
        return (rest, 1.0, 0.0) if ratio == 1 else (rest, mass, 1.0 - ratio)


def joint_ratios(draft: Draft, laws: TargetLaws) -> list[float]:
    """P_0 = 1, P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i)), clipped at each step, as far as it is above 0.

    P_i is the probability that at least i of the drawn tokens are kept.
    """
    ratios = [1.0]
    for node, token in enumerate(draft.tokens):
        ratio = min(1.0, ratios[-1] * laws.after(node - 1).probability(token) / laws.drafted(node).probability(token))
        if ratio <= 0:
            break
        ratios.append(ratio)
    return ratios
