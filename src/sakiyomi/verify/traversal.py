"""traversal: traversal verification. It keeps the distribution and accepts at least as much as `tree`.

A sampled tree is judged from its leaves to its root by the joint ratio along each path: a node that fails falls back to
its next sibling, then to its parent (Weng et al., 2025, "Traversal verification for speculative tree decoding"). On a
chain this is `block`. On deterministic trees nothing can be gained, and it does as `tree`.
"""

from __future__ import annotations

from dataclasses import dataclass

from sakiyomi.noise import Randomness
from sakiyomi.sampling.distributions import (
    SampledRule,
    TargetLaws,
    accept_path,
    drawn_children,
    is_accepted,
)
from sakiyomi.tree import ROOT, Draft
from sakiyomi.types import Sequence, Verdict


class TraversalVerifier(SampledRule):
    """Judges a sampled tree from the leaves up."""

    name = "traversal"

    def judge(self, draft: Draft, laws: TargetLaws, sequence: Sequence) -> Verdict:
        verdict = _Traversal(draft, laws, sequence, self.randomness).visit(ROOT, 1.0)
        assert verdict is not None, "the root always accepts"
        return verdict


@dataclass(frozen=True)
class _Traversal:
    draft: Draft
    laws: TargetLaws
    sequence: Sequence
    randomness: Randomness

    def visit(self, node: int, ratio: float) -> Verdict | None:
        """The verdict somewhere at or below `node`; None, with probability 1 - `ratio`, if it is rejected.

        Given success, what follows `node` has the target's law: a child succeeds with mass min(q, ratio p), and what
        is missing, (ratio p - q)+, is left to the children drawn later and at last to the node itself.
        """
        p = self.laws.after(node)
        for child, q in drawn_children(self.draft, node, p.vocab_size):
            token = self.draft.tokens[child]
            child_ratio = min(1.0, ratio * p.probability(token) / q.probability(token))
            verdict = self.visit(child, child_ratio) if child_ratio > 0 else None
            if verdict is not None:
                return verdict
            p, mass = p.residual(q, ratio)
            if ratio < 1:
                ratio = mass / (mass + 1.0 - ratio)
            if ratio == 0:
                return None
        if node != ROOT and not is_accepted(self.randomness, self.sequence, node, ratio, 1.0):
            return None
        return accept_path(self.draft, self.draft.path(node), p.draw(self.randomness, self.sequence, node))
