"""mlp: a small trained network that reads the target's hidden states drafts chains or trees.

The network (nets/mlp.py) takes the taps of the last verified position and the token that follows, and feeds its own
state back for further tokens. It has no attention and no cache: between steps nothing is kept but one row of taps.
Tokens are found as in the `model` drafter: coupled, independent or argmax (sampling/growth.py).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from sakiyomi.checkpoints.drafter import find_packaged, read_drafter
from sakiyomi.errors import CheckpointError, ParameterError
from sakiyomi.models.eagle import join_rows
from sakiyomi.nets.binding import find_mismatch
from sakiyomi.nets.mlp import HEAD, MlpConfig, MlpSpeculator
from sakiyomi.noise import Randomness
from sakiyomi.ops.base import DraftRoom, DraftRows, GreedyRules
from sakiyomi.plugins import check_growth
from sakiyomi.sampling.distributions import KeyedRandomness
from sakiyomi.sampling.growth import Growth, SubsetCandidates, draft_at_once, fill_in, log_confidence, takes_the_best
from sakiyomi.tree import Draft
from sakiyomi.types import Array, BurstSource, Drafter, DrafterContext, DrafterFile, DrawMode, Lent, Sequence

KIND = "mlp"


class MlpDrafter(Drafter):
    """Drafts with a recurrent MLP speculator that was trained for the target."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options of `mlp`.

        Args:
            path: the drafter file; None takes the one that comes with the package for the target.
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
        self._max_depth = config.num_speculative_tokens
        self._max_nodes = config.num_speculative_tokens if config.width == 1 else config.max_nodes
        self.draw: DrawMode = context.draw if config.draw == "auto" else config.draw
        self.randomness = randomness or KeyedRandomness()
        lent = context.target.lend()
        if lent is None:
            raise ParameterError(
                f"the drafter mlp needs a target that lends its weights, and {context.target.info.name} has none to "
                "lend; take a drafter that needs no training, such as suffix."
            )
        stored = self._find_file(context, lent)
        self.taps = stored.taps
        self.vocab_size = context.target.info.vocab_size
        self.ids = np.arange(self.vocab_size) if stored.vocabulary is None else stored.vocabulary.astype(np.int64)
        self.sharpness = float(stored.config.get("sharpness", 1.0))
        self.ops = lent.ops
        self.net = MlpSpeculator.load(lent.ops, read_config(stored), stored.tensors, lent.embedding, self.vocab_size)
        if HEAD in stored.tensors:
            self.head = lent.ops.weight(stored.tensors[HEAD])
        else:
            self.head = lent.head if stored.vocabulary is None else lent.ops.select_rows(lent.head, stored.vocabulary)
        self.rules = GreedyRules(
            ids=self.ids,
            sharpness=self.sharpness,
            width=config.width,
            lowest=log_confidence(config.min_confidence),
        )

    def _find_file(self, context: DrafterContext, lent: Lent) -> DrafterFile:
        """The drafter file of the options, or the packaged one, made for this target."""
        info, path = context.target.info, self.config.path
        if path is None:
            for packaged in find_packaged(KIND):
                if find_mismatch(packaged.target, info, lent) is None:
                    return packaged
            raise ParameterError(
                f"no trained drafter comes with the package for {info.name}; write mlp:path=FILE with a drafter that "
                "`sakiyomi train mlp` made, or take suffix, which needs none."
            )
        stored = read_drafter(Path(path).expanduser())
        if stored.kind != KIND:
            raise CheckpointError(f"{path} holds a drafter of kind {stored.kind!r}; write {stored.kind}:path={path}.")
        mismatch = find_mismatch(stored.target, info, lent)
        if mismatch is not None:
            raise CheckpointError(
                f"{path} was trained for {stored.target.get('name')}, and {info.name} is another model: {mismatch}; "
                "train a drafter for this one with `sakiyomi train mlp`."
            )
        return stored

    @cached_property
    def _draft_rows(self) -> DraftRows:
        # With the first draft: it takes 25 MB and a twentieth of a second, for which no first token should wait.
        return self.net.drafts(self.head, self.rules)

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        rooms = list(map(self._find_room, sequences, budgets))
        # The usual case by itself: a pass of the target has driven all code from the caches, and each function more
        # between two passes costs a microsecond.
        if len(rooms) == 1 and rooms[0].max_depth > 0 and takes_the_best(sequences[0], self.draw):
            drafts = self._draft_rows(sequences[0].memo.taps, sequences[0].tokens[-1:], rooms)
            if drafts[0] is not None:
                return [drafts[0]]
        return fill_in(
            self._draft_at_once(sequences, rooms),
            lambda late: self._draft_by_levels([sequences[i] for i in late], [rooms[i] for i in late]),
        )

    def _draft_at_once(self, sequences: Seq[Sequence], rooms: Seq[DraftRoom]) -> list[Draft | None]:
        return draft_at_once(sequences, rooms, self.draw, self._draft_best)

    def _draft_best(self, sequences: Seq[Sequence], rooms: Seq[DraftRoom]) -> list[Draft | None]:
        taps, tokens = [], []
        for sequence in sequences:
            taps.append(sequence.memo.taps)
            tokens.append(sequence.tokens[-1])
        return self._draft_rows(join_rows(taps), tokens, rooms)

    def _draft_by_levels(self, sequences: Seq[Sequence], rooms: Seq[DraftRoom]) -> list[Draft]:
        growths = [self._start(sequence, room) for sequence, room in zip(sequences, rooms, strict=True)]
        active = growths
        taps = join_rows([growth.sequence.memo.taps for growth in active])
        states, logits = self.net.start_logits(taps, self._tokens(active), self.head)
        while active:
            self._add_level(active, self.ops.to_numpy(logits))
            rows = self._rows_that_go_on(active)
            active = [growth for growth in active if growth.frontier]
            if active:
                states = states if rows == list(range(len(states))) else states[rows]
                states, logits = self.net.advance_logits(states, self._tokens(active), self.head)
        return [growth.draft() if len(growth.tree) else Draft.empty() for growth in growths]

    def observe(self, sequence: Sequence, start: int, tokens: Seq[int], taps: Array | None) -> None:
        # A memo is never changed, so that sequences that fork may share it.
        if taps is not None and len(tokens):
            sequence.memo = _Memo(start + len(tokens), taps[len(tokens) - 1 : len(tokens)])

    def burst_source(self, sequence: Sequence) -> BurstSource | None:
        if not self.ops.has_bursts or (self.draw == "independent" and not sequence.params.is_greedy):
            return None
        room = self._find_room(sequence, self._max_nodes)
        if room.max_depth == 0:
            return None
        return BurstSource(self._draft_rows, room.max_depth, room.max_nodes, sequence.memo.taps, self.draw == "coupled")

    def rewind(self, sequence: Sequence, length: int) -> None:
        if isinstance(sequence.memo, _Memo) and sequence.memo.length > length:
            sequence.memo = None

    def fork(self, sequence: Sequence) -> _Memo | None:
        return sequence.memo if isinstance(sequence.memo, _Memo) else None

    def _find_room(self, sequence: Sequence, budget: int) -> DraftRoom:
        memo = sequence.memo
        # Without the taps of the last position fed (attached late, or behind a rewind) there is nothing to draft from.
        is_ready = isinstance(memo, _Memo) and memo.length == len(sequence.tokens) - 1
        max_depth = min(budget, self._max_depth) if is_ready else 0
        return DraftRoom(max_depth, min(budget, self._max_nodes), sequence.end_ids)

    def _start(self, sequence: Sequence, room: DraftRoom) -> Growth:
        return Growth(
            sequence,
            self.draw,
            self.randomness,
            width=self.config.width,
            max_depth=room.max_depth,
            max_nodes=room.max_nodes,
            min_confidence=self.config.min_confidence,
        )

    def _add_level(self, active: Seq[Growth], logits: npt.NDArray[np.float32]) -> None:
        """Append the children of all frontiers, one row of logits for each node."""
        row = 0
        for growth in active:
            for node in growth.frontier:
                growth.add(node, SubsetCandidates(logits[row], self.ids, self.vocab_size, self.sharpness))
                row += 1

    def _rows_that_go_on(self, active: Seq[Growth]) -> list[int]:
        """Choose the next frontiers; for each node of them the row that its parent's state stands in."""
        rows, first = [], 0
        for growth in active:
            row_of = {node: first + i for i, node in enumerate(growth.frontier)}
            first += len(growth.frontier)
            growth.go_on()
            rows += [row_of[growth.tree.parents[node]] for node in growth.frontier]
        return rows

    def _tokens(self, active: Seq[Growth]) -> npt.NDArray[np.int32]:
        return np.array([growth.token(node) for growth in active for node in growth.frontier], np.int32)


class _Memo(NamedTuple):
    """The taps [1, D] of the last of `length` positions."""

    length: int
    taps: Array


def read_config(stored: DrafterFile) -> MlpConfig:
    """The shape of the net in a drafter file.

    Raises:
        CheckpointError: a number is missing or is none.
    """
    try:
        numbers = {name: int(stored.config[name]) for name in ("hidden_size", "inner_size", "num_tokens")}
        return MlpConfig(**numbers, num_taps=len(stored.taps), eps=float(stored.config["eps"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the drafter's configuration {dict(stored.config)} is not that of an mlp.") from error
