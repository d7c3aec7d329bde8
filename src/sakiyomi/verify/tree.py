"""tree: multi-round speculative sampling over a tree. It keeps the distribution.

At each node the children are tried in the order of drawing, each against what the ones before have left of the
target's law: accept x with probability min(1, r(x) / q(x)), else r becomes (r - q)+ (SpecInfer, Miao et al., 2024, for
independent draws; without replacement as in Sequoia, Chen et al., 2024, and MCSD, Yang et al., 2024). Deterministic
children, as of EAGLE-2, are judged by drawing from p and comparing. On a chain this is `rejection`.
"""

from __future__ import annotations

from sakiyomi.sampling.distributions import (
    Law,
    SampledRule,
    TargetLaws,
    accept_path,
    drawn_children,
    is_accepted,
)
from sakiyomi.tree import ROOT, Draft
from sakiyomi.types import Sequence, Verdict


class TreeVerifier(SampledRule):
    """Judges a sampled tree from the root down."""

    name = "tree"

    def judge(self, draft: Draft, laws: TargetLaws, sequence: Sequence) -> Verdict:
        path: list[int] = []
        node = ROOT
        while True:
            child, rest = self._pick_child(draft, laws.after(node), node, sequence)
            if child is None:
                return accept_path(draft, tuple(path), rest.draw(self.randomness, sequence, node))
            path.append(child)
            node = child

    def _pick_child(self, draft: Draft, rest: Law, node: int, sequence: Sequence) -> tuple[int | None, Law]:
        """The accepted child of `node`, or None and what all of them have left of the law."""
        for child, q in drawn_children(draft, node, rest.vocab_size):
            token = draft.tokens[child]
            # A token that is drawn again after its rejection has nothing left in `rest`, so its coin is not used twice.
            if is_accepted(self.randomness, sequence, child, rest.probability(token), q.probability(token)):
                return child, rest
            rest, _ = rest.residual(q)
        return None, rest
