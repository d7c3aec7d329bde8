"""How often drafted tokens turn out right: by the drafter's own confidence where it tells one, by depth otherwise.

Each drafted node whose parent was right gets a label: did the text go on with it? What was drafted but not checked gets
one too as far as the text tells, so that nothing needs to be checked only to learn. A sampled draft is the exception:
there the rule's verdict alone is a label.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from collections.abc import Sequence as Seq

from sakiyomi.tree import DEFAULT_CONFIDENCE, ROOT, SAMPLED, Draft

EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
NUM_BINS = len(EDGES) + 1
MAX_DEPTH = 32
FIRST_OF_DEPTHS = 2 * NUM_BINS
"""Kinds of nodes: by confidence at depth 1, by confidence deeper, and without confidence by depth."""

WEIGHT = 8.0
"""Labels that what was believed before them is worth."""

FADE = 0.94
"""What a label is worth once there is a newer one of its kind: the last 16 count, so that a change shows soon."""

FADE_SHARED = 0.99


class Rates:
    """Shares of right nodes by kind; older labels fade."""

    def __init__(self, fade: float) -> None:
        self._fade = fade
        self._hits = [0.0] * (FIRST_OF_DEPTHS + MAX_DEPTH)
        self._trials = [0.0] * (FIRST_OF_DEPTHS + MAX_DEPTH)

    def add(self, kind: int, hit: bool) -> None:
        self._hits[kind] = self._hits[kind] * self._fade + hit
        self._trials[kind] = self._trials[kind] * self._fade + 1.0

    def rate(self, kind: int, believed: float) -> float:
        return (self._hits[kind] + WEIGHT * believed) / (self._trials[kind] + WEIGHT)


class Acceptance:
    """The rates of one drafter for one sequence, over those for all sequences."""

    def __init__(self, shared: Rates) -> None:
        self._shared = shared
        self._own = Rates(FADE)

    def judge(self, draft: Draft) -> tuple[list[float], list[int]]:
        """For each node its survival, that is the probability that the text passes through it, and its kind."""
        survivals: list[float] = []
        kinds: list[int] = []
        confidences, parents = draft.confidences, draft.parents
        if confidences is None:
            return self._judge_by_depth(draft)
        for confidence, parent in zip(confidences, parents, strict=True):
            if parent == ROOT:
                share, above, first = confidence, 1.0, 0
            else:
                share = confidence / (confidences[parent] or 1.0)
                above, first = survivals[parent], NUM_BINS
            kind = first + bisect_right(EDGES, share)
            survivals.append(above * self._rate(kind, share))
            kinds.append(kind)
        return survivals, kinds

    def _judge_by_depth(self, draft: Draft) -> tuple[list[float], list[int]]:
        survivals: list[float] = []
        kinds: list[int] = []
        num_children: dict[int, int] = {}
        for parent in draft.parents:
            num_children[parent] = num_children.get(parent, 0) + 1
        rates = list(self.conditionals(max(draft.depths, default=0)))
        for parent, depth in zip(draft.parents, draft.depths, strict=True):
            # Nothing tells siblings apart, so they share what their depth is believed with.
            share = rates[min(depth, MAX_DEPTH) - 1] / num_children[parent]
            survivals.append(share * (1.0 if parent == ROOT else survivals[parent]))
            kinds.append(FIRST_OF_DEPTHS + min(depth, MAX_DEPTH) - 1)
        return survivals, kinds

    def conditionals(self, max_depth: int) -> Iterator[float]:
        """Acceptance of each depth given the one before; a depth of which little is known resembles that one."""
        believed = DEFAULT_CONFIDENCE
        for depth in range(min(max_depth, MAX_DEPTH)):
            believed = self._rate(FIRST_OF_DEPTHS + depth, believed)
            yield believed

    def lines(self) -> tuple[list[float], list[float]]:
        """For each kind by confidence how `judge` believes a node given its parent: offset + slope * its share."""
        offsets = [self._rate(kind, 0.0) for kind in range(FIRST_OF_DEPTHS)]
        return offsets, [self._rate(kind, 1.0) - offset for kind, offset in enumerate(offsets)]

    def _rate(self, kind: int, believed: float) -> float:
        return self._own.rate(kind, self._shared.rate(kind, believed))

    def learn(self, draft: Draft, kinds: Seq[int], tokens: Seq[int], num_accepted: int) -> int:
        """Label the nodes by what was emitted; returns how deep the draft was right.

        Args:
            kinds: of `judge`.
            tokens: the ids that the step emitted.
            num_accepted: how many of them the rule took from a draft.
        """
        # A sampled token that the rule refused may be emitted all the same by the draw that follows.
        limit = num_accepted if draft.drawn in SAMPLED else len(tokens)
        depths = {ROOT: 0}
        deepest = 0
        tried: dict[int, bool] = {}
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
            depth = depths.get(parent)
            if depth is None or depth >= len(tokens):
                continue
            hit = depth < limit and token == tokens[depth]
            if hit:
                depths[node] = deepest = depth + 1
            if kinds[node] < FIRST_OF_DEPTHS:
                self._add(kinds[node], hit)
            tried[depth] = tried.get(depth, False) or hit
        if not len(draft):
            tried[0] = False
        for depth, hit in tried.items():
            self._add(FIRST_OF_DEPTHS + min(depth, MAX_DEPTH - 1), hit)
        return deepest

    def _add(self, kind: int, hit: bool) -> None:
        self._own.add(kind, hit)
        self._shared.add(kind, hit)
