"""eagle3: a trained decoder layer on the target's hidden states drafts chains or trees (EAGLE-1, -2, -3 and -3.1).

The head (nets/eagle3.py) extends its cache by the rows that the target has verified, then feeds its own states back
(Li et al., 2024 and 2025). With a width above 1 it grows EAGLE-2's dynamic trees: the most confident nodes of each
depth go on, and the most confident of all are drafted. Tokens are found as in the `model` drafter (sampling/growth.py).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import numpy as np

from sakiyomi.models.eagle import HeadMemo, join_rows, open_head
from sakiyomi.noise import Randomness
from sakiyomi.ops.base import Causal, DraftRoom, GreedyRules, Tree
from sakiyomi.plugins import check_growth
from sakiyomi.sampling.distributions import KeyedRandomness
from sakiyomi.sampling.growth import Growth, SubsetCandidates, draft_at_once, fill_in, log_confidence
from sakiyomi.tree import ROOT, Draft
from sakiyomi.types import Array, Drafter, DrafterContext, DrawMode, Sequence


class Eagle3Drafter(Drafter):
    """Drafts with an EAGLE head that was trained for the target."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options of `eagle3`.

        Args:
            path: a file that `sakiyomi train eagle3` made, or the folder of a published EAGLE-1, EAGLE-3 or
                speculators head; None takes the one that comes with the package for the target.
            num_speculative_tokens: depth of a draft at most, the length of a chain.
            width: children of a node, and nodes that go on at each depth; 1 drafts chains.
            max_nodes: nodes of a tree at most.
            min_confidence: what is believed with less is not drafted.
            draw: "coupled", "independent" or "argmax"; "auto" takes what the verifier asks for.
        """

        path: str | None = None
        num_speculative_tokens: int = 3
        width: int = 1
        max_nodes: int = 8
        min_confidence: float = 0.0
        draw: Literal["auto", "coupled", "independent", "argmax"] = "auto"

        def __post_init__(self) -> None:
            check_growth(self)

    def __init__(self, config: Config, context: DrafterContext, randomness: Randomness | None = None) -> None:
        self.config = config
        self.draw: DrawMode = context.draw if config.draw == "auto" else config.draw
        self.randomness = randomness or KeyedRandomness()
        self.parts = open_head(("eagle3", "eagle1"), config.path, context)
        self.taps = self.parts.taps
        self.runner = self.parts.new_runner(context.target.info.max_model_len)
        self.rules = GreedyRules(
            ids=self.parts.ids,
            sharpness=self.parts.sharpness,
            width=config.width,
            lowest=log_confidence(config.min_confidence),
        )

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        rooms = [self._find_room(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]
        return fill_in(
            self._draft_at_once(sequences, rooms),
            lambda late: self._draft_by_levels([sequences[i] for i in late], [rooms[i] for i in late]),
        )

    def _draft_at_once(self, sequences: Seq[Sequence], rooms: Seq[DraftRoom]) -> list[Draft | None]:
        return draft_at_once(sequences, rooms, self.draw, self._draft_best if self.config.width == 1 else None)

    def _draft_best(self, sequences: Seq[Sequence], rooms: Seq[DraftRoom]) -> list[Draft | None]:
        return self.runner.draft([sequence.memo for sequence in sequences], sequences, self.rules, rooms)

    def _draft_by_levels(self, sequences: Seq[Sequence], rooms: Seq[DraftRoom]) -> list[Draft]:
        growths = [self._start(sequence, room) for sequence, room in zip(sequences, rooms, strict=True)]
        active = growths
        self.runner.catch_up([growth.memo for growth in active], list(sequences))
        self._begin(active)
        feed = self._feed_chains if self.config.width == 1 else self._feed
        while active := [growth for growth in active if growth.frontier]:
            feed(active)
        for growth in growths:
            growth.end()
        return [growth.draft() if len(growth.tree) else Draft.empty() for growth in growths]

    def observe(self, sequence: Sequence, start: int, tokens: Seq[int], taps: Array | None) -> None:
        if not isinstance(sequence.memo, HeadMemo):
            sequence.memo = self.runner.new_memo()
        self.runner.observe(sequence.memo, sequence, start, taps)

    def rewind(self, sequence: Sequence, length: int) -> None:
        if isinstance(sequence.memo, HeadMemo):
            self.runner.rewind(sequence.memo, length)

    def fork(self, sequence: Sequence) -> HeadMemo | None:
        return sequence.memo.fork() if isinstance(sequence.memo, HeadMemo) else None

    def _find_room(self, sequence: Sequence, budget: int) -> DraftRoom:
        memo, config = sequence.memo, self.config
        is_ready = isinstance(memo, HeadMemo) and self.runner.is_ready(memo, sequence)
        return DraftRoom(
            max_depth=min(budget, config.num_speculative_tokens) if is_ready else 0,
            max_nodes=min(budget, config.num_speculative_tokens if config.width == 1 else config.max_nodes),
            end_ids=sequence.end_ids,
        )

    def _start(self, sequence: Sequence, room: DraftRoom) -> _Growth:
        return _Growth(
            sequence,
            self.draw,
            self.randomness,
            width=self.config.width,
            max_depth=room.max_depth,
            max_nodes=room.max_nodes,
            min_confidence=self.config.min_confidence,
        )

    def _begin(self, active: Seq[_Growth]) -> None:
        """The children of the roots, from the rows that the target's features made."""
        rows = [growth.memo.last[0] for growth in active if growth.memo.last is not None]
        logits = self.runner.ops.to_numpy(join_rows(rows))
        for row, growth in enumerate(active):
            assert growth.memo.last is not None, "the last row was just fed"
            growth.states[ROOT] = growth.memo.last[1]
            growth.add(ROOT, self._candidates(logits[row]))
            growth.go_on()

    def _feed(self, active: Seq[_Growth]) -> None:
        """Run the frontiers, in trees behind their ancestors, and append their children."""
        parts = [growth.rows() for growth in active]
        bounds = (0, *accumulate(len(part.tokens) for part in parts))
        rows, states = self.runner.run(
            [growth.memo for growth in active],
            np.array([token for part in parts for token in part.tokens], np.int32),
            join_rows([feature for part in parts for feature in part.features]),
            np.array([position for part in parts for position in part.positions], np.int32),
            Tree(np.array([parent for part in parts for parent in part.parents], np.int32), bounds),
            bounds,
            [
                row
                for growth, end in zip(active, bounds[1:], strict=True)
                for row in range(end - len(growth.frontier), end)
            ],
        )
        logits = self.runner.ops.to_numpy(rows)
        row = 0
        for growth, end in zip(active, bounds[1:], strict=True):
            growth.take(states, end)
            for node in growth.frontier:
                growth.add(node, self._candidates(logits[row]))
                row += 1
            growth.go_on()

    def _feed_chains(self, active: Seq[_Growth]) -> None:
        """`_feed` of chains: each has one node to run, behind rows that its cache keeps until the draft is done."""
        memos = [growth.memo for growth in active]
        tokens = np.array([growth.tree.tokens[-1] for growth in active], np.int32)
        positions = np.array([memo.cache.length for memo in memos], np.int32)
        features = join_rows([growth.states[ROOT] for growth in active])
        bounds = tuple(range(len(active) + 1))
        rows, states = self.runner.run(memos, tokens, features, positions, Causal(bounds), bounds)
        logits = self.runner.ops.to_numpy(rows)
        for row, growth in enumerate(active):
            growth.states[ROOT] = states[row : row + 1]  # what the next node reads
            memos[row].cache.keep((0,))
            growth.add(growth.frontier[0], self._candidates(logits[row]))
            growth.go_on()

    def _candidates(self, logits: np.ndarray[tuple[int], np.dtype[np.float32]]) -> SubsetCandidates:
        parts = self.parts
        return SubsetCandidates(logits, parts.ids, parts.vocab_size, parts.sharpness)


@dataclass(frozen=True, slots=True)
class _Rows:
    """What a pass computes for one sequence."""

    tokens: list[int]
    features: list[Array]
    positions: list[int]
    parents: list[int]


class _Growth(Growth):
    """A draft with the cache that its rows land in.

    A tree's rows are fed again in front of the next frontier.

    Attributes:
        states: for each node that was fed, and for the root, the state [1, H] that its children read; of a chain the
            root's place holds that of the last node.
    """

    def __init__(self, *args: Any, width: int, **options: Any) -> None:
        super().__init__(*args, width=width, **options)
        self.states: dict[int, Array] = {}
        self._base = len(self.sequence.tokens) - 1
        self._fed: list[int] = []

    @property
    def memo(self) -> HeadMemo:
        memo = self.sequence.memo
        assert isinstance(memo, HeadMemo), "only sequences that were observed grow"
        return memo

    def rows(self) -> _Rows:
        """The frontier behind its ancestors."""
        nodes = [*self._fed, *self.frontier]
        index = {node: row for row, node in enumerate(nodes)}
        parents = [self.tree.parents[node] for node in nodes]
        return _Rows(
            [self.tree.tokens[node] for node in nodes],
            [self.states[parent] for parent in parents],
            [self._base + self.tree.depths[node] - 1 for node in nodes],
            [index.get(parent, -1) for parent in parents],
        )

    def take(self, states: Array, end: int) -> None:
        """Note the states of the frontier, whose rows end before `end`."""
        first = end - len(self.frontier)
        for i, node in enumerate(self.frontier):
            self.states[node] = states[first + i : first + i + 1]
        self._fed += self.frontier

    def end(self) -> None:
        """Drop the rows of the draft: they hold guesses."""
        if self.states:
            self.memo.cache.truncate(self._base)
