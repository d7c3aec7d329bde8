"""Growing a draft from the logits of a drafting model: a chain, or a tree where the model is confident.

How tokens are found, `draw`:

- coupled: with the seed, position and parameters of the request, so that where drafter and target agree in law they
  agree in token (Daliri, Musco and Suresh, 2024). For the rule `match`.
- independent: sampled with randomness of its own and reported with its laws, siblings without replacement (Gumbel
  top-k). For the rules that keep the distribution.
- argmax: the most probable tokens. For any rule.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Literal

import numpy as np

from sakiyomi.noise import PURPOSE_DRAFT, Randomness
from sakiyomi.sampling.choose import rank
from sakiyomi.sampling.distributions import Law, law_of
from sakiyomi.tree import ROOT, Draft, TreeBuilder
from sakiyomi.types import DrawMode, Output, Sequence


class DraftGrower:
    """A draft of one sequence in the making, level by level, as in EAGLE-2 (Li et al., 2024).

    It is cut to its most confident nodes at the end unless it is sampled.

    Args:
        width: children of a node, and nodes that go on at each depth; 1 grows a chain.
        max_depth, max_nodes: where it ends; a draft of depth 0 grows nothing.

    Attributes:
        frontier: the nodes whose children come next (-1: the root); empty when the draft is grown.
    """

    def __init__(
        self,
        sequence: Sequence,
        draw: DrawMode,
        randomness: Randomness,
        *,
        width: int,
        max_depth: int,
        max_nodes: int,
    ) -> None:
        self.sequence = sequence
        self.frontier = [ROOT] if max_depth > 0 and max_nodes > 0 else []
        # At temperature 0 all three ways take the most probable token, which no law needs to describe.
        self._draw: DrawMode = "argmax" if sequence.params.is_greedy else draw
        self._randomness = randomness
        self._width = width
        self._max_depth = max_depth
        self._max_nodes = max_nodes
        self._tree = TreeBuilder()
        self._laws: list[Law] = []

    def token(self, node: int) -> int:
        """The token of a node; that of the root is the last committed one."""
        return self.sequence.tokens[-1] if node == ROOT else self._tree.tokens[node]

    def parent(self, node: int) -> int:
        """The parent of a node, -1 the root."""
        return self._tree.parents[node]

    def grow(self, output: Output) -> None:
        """Append the children of the frontier; the output's i-th row is that of the frontier's i-th node."""
        for row, node in enumerate(self.frontier):
            self._add_children(node, row, output)
        is_full = self._draw == "independent" and len(self._tree) >= self._max_nodes
        goes_on = max(self._tree.depths, default=self._max_depth) < self._max_depth and not is_full
        self.frontier = self._tree.frontier(self._width, self.sequence.end_ids) if goes_on else []

    def _add_children(self, node: int, row: int, output: Output) -> None:
        history = self.sequence.history(self._tree.path_tokens(node))
        if self._draw == "argmax" and not history.params.is_greedy:
            history = replace(history, params=replace(history.params, temperature=0.0))
        if self._draw == "independent":
            # How many are drawn is settled before any is, and none is dropped afterwards: laws stay what they are.
            count = min(self._width, self._max_nodes - len(self._tree))
            law = law_of(output.row(row), history)
            key = self.sequence.noise_key(node, PURPOSE_DRAFT)
            tokens = self._randomness.draw(key, law.ids, law.probs, count) if count > 0 else []
            self._laws += [law] * len(tokens)
            self._tree.add(node, tokens, [float(np.log(law.probability(token))) for token in tokens])
        elif self._width == 1:
            self._tree.add(node, [output.choose(row, history)], [0.0])
        else:
            self._tree.add(node, *rank(output.row(row), history, self._width))

    def draft(self, leading: Seq[int] = ()) -> Draft:
        """The grown draft.

        Args:
            leading: nodes that it shall begin with, in this order, parents before children.
        """
        if self._draw != "independent":
            drawn: Literal["fixed", "coupled"] = "fixed" if self._draw == "argmax" else "coupled"
            order = _put_first(leading, self._tree.select(self._max_nodes))
            return self._tree.build(order[: self._max_nodes], drawn)
        order = _put_first(leading, range(len(self._tree)))
        place = {node: i for i, node in enumerate(order)}
        return replace(
            self._tree.build(order),
            drawn="independent" if self._width == 1 else "without_replacement",
            probs=[self._laws[node].probs for node in order],
            probs_ids=[self._laws[node].ids for node in order],
            draws=tuple(place[node] for node in range(len(order))) if leading else None,
        )


def _put_first(leading: Seq[int], nodes: Seq[int]) -> list[int]:
    first = set(leading)
    return [*leading, *(node for node in nodes if node not in first)]
