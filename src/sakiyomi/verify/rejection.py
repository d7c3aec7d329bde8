"""rejection: the token rule of speculative sampling. It keeps the distribution, not the tokens.

Accept a drafted token x with probability min(1, p(x) / q(x)); at the first rejection draw from (p - q)+ instead, and
behind a fully accepted chain from p (Leviathan, Kalman and Matias, 2023; Chen et al., 2023, who write p and q the
other way round).
"""

from __future__ import annotations

from sakiyomi.sampling.distributions import (
    SampledRule,
    TargetLaws,
    accept_path,
    is_accepted,
)
from sakiyomi.tree import Draft
from sakiyomi.types import Sequence, Verdict


class RejectionVerifier(SampledRule):
    """Judges the tokens of a sampled chain one by one."""

    name = "rejection"
    needs_chain = True

    def judge(self, draft: Draft, laws: TargetLaws, sequence: Sequence) -> Verdict:
        for node, token in enumerate(draft.tokens):
            p, q = laws.after(node - 1), laws.drafted(node)
            if not is_accepted(self.randomness, sequence, node, p.probability(token), q.probability(token)):
                rest, _ = p.residual(q)
                return accept_path(draft, tuple(range(node)), rest.draw(self.randomness, sequence, node - 1))
        last = len(draft) - 1
        return accept_path(draft, tuple(range(len(draft))), laws.after(last).draw(self.randomness, sequence, last))
