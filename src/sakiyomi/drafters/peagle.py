"""peagle: an EAGLE head that drafts all its tokens in one pass (P-EAGLE, Hui et al., 2026).

Behind the rows that the target has verified stand placeholder rows, all with the same learnt inputs; each predicts the
token one place further on without knowing the guesses in between. They are dropped after the pass. Tokens are found as
in the `model` drafter (sampling/growth.py); trees grow by the confidences of the places.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

from sakiyomi.models.eagle import HeadMemo, open_head
from sakiyomi.noise import Randomness
from sakiyomi.ops.base import DraftRoom, GreedyRules
from sakiyomi.plugins import check_growth
from sakiyomi.sampling.distributions import KeyedRandomness
from sakiyomi.sampling.growth import Growth, SubsetCandidates, draft_at_once, fill_in, log_confidence
from sakiyomi.tree import Draft
from sakiyomi.types import Array, Drafter, DrafterContext, DrawMode, Sequence


class PEagleDrafter(Drafter):
    """Drafts with a parallel EAGLE head that was trained for the target."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options of `peagle`.

        Args:
            path: a file that `sakiyomi train peagle` made, or the folder of a published head; None takes the one that
                comes with the package for the target.
            num_speculative_tokens: depth of a draft at most; no more than the head was trained for pay.
            width: children of a node, and nodes that go on at each depth; 1 drafts chains.
            max_nodes: nodes of a tree at most.
            min_confidence: what is believed with less is not drafted.
            draw: "coupled", "independent" or "argmax"; "auto" takes what the verifier asks for.
        """

        path: str | None = None
        num_speculative_tokens: int = 5
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
        self.parts = open_head(("peagle",), config.path, context)
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
        return draft_at_once(sequences, rooms, self.draw, self._draft_best)

    def _draft_best(self, sequences: Seq[Sequence], rooms: Seq[DraftRoom]) -> list[Draft | None]:
        return self.runner.draft([sequence.memo for sequence in sequences], sequences, self.rules, rooms)

    def _draft_by_levels(self, sequences: Seq[Sequence], rooms: Seq[DraftRoom]) -> list[Draft]:
        depth = max(room.max_depth for room in rooms)
        found = self.runner.look_ahead([sequence.memo for sequence in sequences], sequences, depth - 1)
        rows = [self.runner.ops.to_numpy(logits) for logits in found]
        return [self._grow(*given) for given in zip(sequences, rooms, rows, strict=True)]

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

    def _grow(self, sequence: Sequence, room: DraftRoom, logits: Array) -> Draft:
        growth = Growth(
            sequence,
            self.draw,
            self.randomness,
            width=self.config.width,
            max_depth=room.max_depth,
            max_nodes=room.max_nodes,
            min_confidence=self.config.min_confidence,
        )
        parts, depth = self.parts, 0
        while growth.frontier:
            candidates = SubsetCandidates(logits[depth], parts.ids, parts.vocab_size, parts.sharpness)
            for node in growth.frontier:
                growth.add(node, candidates)
            growth.go_on()
            depth += 1
        return growth.draft() if len(growth.tree) else Draft.empty()
