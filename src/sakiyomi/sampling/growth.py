"""Growing a draft from the logits of a drafting network, in the three ways of `types.DrawMode`.

Level by level, a drafter asks for the `frontier`, computes a row of logits for each of its nodes, and hands them to
`add`. Trees grow where the network is confident, as in EAGLE-2 (Li et al., 2024), and are cut to the most confident
nodes unless they are sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Literal, Protocol

import numpy as np

from sakiyomi.noise import PURPOSE_DRAFT, Randomness
from sakiyomi.ops.base import DraftRoom
from sakiyomi.sampling.choose import Float32s, Ids, depends_on_ids, rank, treats_ids_unalike
from sakiyomi.sampling.distributions import Law, law_at, law_of
from sakiyomi.tree import ROOT, Draft, TreeBuilder
from sakiyomi.types import DrawMode, History, Output, Sequence


class Candidates(Protocol):
    """What may follow a node."""

    def best(self, history: History) -> tuple[int, float]:
        """The token that would be chosen, and the logarithm of its confidence (0 where nobody asks)."""
        ...

    def rank(self, history: History, count: int) -> tuple[list[int], list[float]]:
        """As `sampling.choose.rank`."""
        ...

    def law(self, history: History) -> Law:
        """As `sampling.distributions.law_of`."""
        ...


class OutputCandidates:
    """The i-th asked row of a model's output."""

    def __init__(self, output: Output, i: int) -> None:
        self._output = output
        self._i = i

    def best(self, history: History) -> tuple[int, float]:
        return self._output.choose(self._i, history), 0.0

    def rank(self, history: History, count: int) -> tuple[list[int], list[float]]:
        return rank(self._output.row(self._i), history, count)

    def law(self, history: History) -> Law:
        return law_at(self._output, self._i, history)


class SubsetCandidates:
    """Logits [K] of some ids; all others have probability 0.

    Args:
        ids: ascending ids [K].
        vocab_size: V.
        sharpness: factor on the logits from which greedy choices take their confidences.
    """

    def __init__(self, logits: Float32s, ids: Ids, vocab_size: int, sharpness: float = 1.0) -> None:
        self._logits = logits
        self._ids = ids
        self._vocab_size = vocab_size
        self._sharpness = sharpness

    def best(self, history: History) -> tuple[int, float]:
        tokens, confidences = self.rank(history, 1)
        return tokens[0], confidences[0]

    def rank(self, history: History, count: int) -> tuple[list[int], list[float]]:
        logits = self._logits
        if history.params.is_greedy and self._sharpness != 1:
            logits = logits * np.float32(self._sharpness)
        if depends_on_ids(history):
            return rank(self._spread(logits), history, count)
        return rank(logits, history, count, self._ids)

    def law(self, history: History) -> Law:
        if depends_on_ids(history):
            return law_of(self._spread(self._logits), history)
        law = law_of(self._logits, history)
        return Law(self._ids[law.ids], law.probs, self._vocab_size)

    def _spread(self, logits: Float32s) -> Float32s:
        row = np.full(self._vocab_size, -np.inf, np.float32)
        row[self._ids] = logits
        return row


class Growth:
    """A draft of one sequence in the making.

    Args:
        draw: how tokens are found; at temperature 0 the most probable ones are taken, which no law needs to describe.
        width: children of a node, and nodes that go on at each depth; 1 grows a chain.
        max_depth, max_nodes: of the draft.
        min_confidence: what is believed with less does not go on, and is dropped unless it was sampled.

    Attributes:
        frontier: the nodes whose children come next; the first is the root.
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
        min_confidence: float = 0.0,
    ) -> None:
        self.sequence = sequence
        self.max_depth = max_depth
        self.frontier = [ROOT] if min(max_depth, max_nodes) > 0 else []
        self.tree = TreeBuilder()
        self._draw = "argmax" if sequence.params.is_greedy else draw
        self._randomness = randomness
        self._width = width
        self._max_nodes = max_nodes
        self._lowest = log_confidence(min_confidence)
        self._laws: list[Law] = []

    def token(self, node: int) -> int:
        """The token of a node; the root's is the last committed one."""
        return self.sequence.tokens[-1] if node == ROOT else self.tree.tokens[node]

    def parent(self, node: int) -> int:
        """The parent of a node, -1 the root."""
        return self.tree.parents[node]

    def grow(self, output: Output) -> None:
        """Append the children of the frontier and go on; the output's i-th row is that of the frontier's i-th node."""
        for row, node in enumerate(self.frontier):
            self.add(node, OutputCandidates(output, row))
        self.go_on()

    @property
    def is_sampled(self) -> bool:
        """Whether tokens are drawn with randomness of the drafter's own."""
        return self._draw == "independent"

    def lay_out(self, paths: Seq[tuple[int, ...]], rows: Seq[Candidates]) -> None:
        """Grow a whole tree of a given shape.

        Args:
            paths: for each node the ranks among the candidates from the root on; shorter paths come first.
            rows: the candidates of each depth, whatever the path.
        """
        nodes: dict[tuple[int, ...], int] = {(): ROOT}
        for path in paths:
            above = nodes.get(path[:-1])
            if above is None or len(path) > self.max_depth or len(self.tree) >= self._max_nodes:
                continue
            tokens, confidences = rows[len(path) - 1].rank(self._history(above), path[-1] + 1)
            if len(tokens) == path[-1] + 1:
                nodes[path] = len(self.tree)
                self.tree.add(above, tokens[-1:], confidences[-1:])
        self.frontier = []

    def _history(self, node: int) -> History:
        history = self.sequence.history(self.tree.path_tokens(node))
        if self._draw == "argmax" and not history.params.is_greedy:
            return replace(history, params=replace(history.params, temperature=0.0))
        return history

    def add(self, node: int, candidates: Candidates) -> None:
        """Append the children of a node of the frontier."""
        history = self._history(node)
        if self._draw == "independent":
            # How many are drawn is settled before any is, and none is dropped afterwards: laws stay what they are.
            count = min(self._width, self._max_nodes - len(self.tree))
            law = candidates.law(history)
            key = self.sequence.noise_key(node, PURPOSE_DRAFT)
            tokens = self._randomness.draw(key, law.ids, law.probs, count) if count > 0 else []
            self._laws += [law] * len(tokens)
            self.tree.add(node, tokens, [float(np.log(law.probability(token))) for token in tokens])
        elif self._width == 1:
            token, confidence = candidates.best(history)
            self.tree.add(node, [token], [confidence])
        else:
            self.tree.add(node, *candidates.rank(history, self._width))

    def go_on(self) -> None:
        """Choose the next frontier, empty when the draft is grown."""
        depth = max(self.tree.depths, default=self.max_depth)
        is_full = self._draw == "independent" and len(self.tree) >= self._max_nodes
        nodes = self.tree.frontier(self._width, self.sequence.end_ids) if depth < self.max_depth and not is_full else []
        self.frontier = [node for node in nodes if self.tree.confidences[node] >= self._lowest]

    def draft(self, leading: Seq[int] = ()) -> Draft:
        """The draft as it is grown.

        Args:
            leading: nodes that it shall begin with, in this order, parents before children.
        """
        if self._draw == "independent":
            return self._sampled_draft(leading)
        drawn: Literal["fixed", "coupled"] = "fixed" if self._draw == "argmax" else "coupled"
        chosen = [n for n in self.tree.select(self._max_nodes) if self.tree.confidences[n] >= self._lowest]
        return self.tree.build(_put_first(leading, chosen)[: self._max_nodes], drawn)

    def _sampled_draft(self, leading: Seq[int]) -> Draft:
        order = _put_first(leading, range(len(self.tree)))
        place = {node: i for i, node in enumerate(order)}
        return replace(
            self.tree.build(order),
            drawn="independent" if self._width == 1 else "without_replacement",
            probs=[self._laws[node].probs for node in order],
            probs_ids=[self._laws[node].ids for node in order],
            draws=tuple(place[node] for node in range(len(order))) if leading else None,
        )


def takes_the_best(sequence: Sequence, draw: DrawMode) -> bool:
    """Whether `Growth` takes the largest of the logits as they are, at every node."""
    # Deeper nodes are further from the prompt, so no parameter begins to act below the root.
    params = sequence.params
    return (draw == "argmax" or params.is_greedy) and not treats_ids_unalike(params, sequence.num_new)


def log_confidence(min_confidence: float) -> float:
    """The logarithm, -inf for 0."""
    return float(np.log(min_confidence)) if min_confidence > 0 else -np.inf


def draft_at_once(
    sequences: Seq[Sequence],
    rooms: Seq[DraftRoom],
    draw: DrawMode,
    draft: Callable[[list[Sequence], list[DraftRoom]], Seq[Draft | None]] | None,
) -> list[Draft | None]:
    """Drafts of the most probable tokens, and empty ones where there is no room; None for all others.

    Args:
        draft: drafts for some of the sequences in one call, with None where it cannot; None: there is no such call.
    """
    drafts: list[Draft | None] = []
    chosen: list[int] = []
    some: list[Sequence] = []
    wanted: list[DraftRoom] = []
    # One loop: with a small target this stands between two passes, where each comprehension more can be measured.
    for sequence, room in zip(sequences, rooms, strict=True):
        has_room = room.max_depth > 0 and room.max_nodes > 0
        if has_room and draft is not None and takes_the_best(sequence, draw):
            chosen.append(len(drafts))
            some.append(sequence)
            wanted.append(room)
        drafts.append(None if has_room else Draft.empty())
    if some and draft is not None:
        for i, found in zip(chosen, draft(some, wanted), strict=True):
            drafts[i] = found
    return drafts


def fill_in(drafts: Seq[Draft | None], grow: Callable[[list[int]], Seq[Draft]]) -> list[Draft]:
    """The drafts, those that are missing grown by `grow`, which is told their numbers."""
    found = [draft for draft in drafts if draft is not None]
    if len(found) == len(drafts):
        return found
    rest = iter(grow([i for i, draft in enumerate(drafts) if draft is None]))
    return [next(rest) if draft is None else draft for draft in drafts]


def _put_first(leading: Seq[int], nodes: Seq[int]) -> list[int]:
    first = set(leading)
    return [*leading, *(node for node in nodes if node not in first)]
