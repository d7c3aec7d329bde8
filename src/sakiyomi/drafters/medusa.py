"""medusa: heads on the target's last hidden state guess the next tokens all at once (Cai et al., 2024).

The heads (nets/medusa.py) do not see each other's guesses, so one pass over one row serves a chain or a tree. A static
tree is laid out once, by how often the first, second, ... choice of each head was right; a dynamic one grows by the
confidences of the step, as in EAGLE-2 (Li et al., 2024). Tokens are found as in the `model` drafter.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sakiyomi.errors import ParameterError
from sakiyomi.models.eagle import join_rows
from sakiyomi.nets.medusa import MedusaConfig, MedusaHeads
from sakiyomi.noise import Randomness
from sakiyomi.ops.base import DraftRoom, GreedyRules
from sakiyomi.plugins import check_growth
from sakiyomi.sampling.distributions import KeyedRandomness
from sakiyomi.sampling.growth import Growth, SubsetCandidates, draft_at_once, fill_in, log_confidence
from sakiyomi.tree import Draft
from sakiyomi.types import Array, Drafter, DrafterContext, DrawMode, Sequence

RankPath = tuple[int, ...]
Row = np.ndarray[tuple[int], np.dtype[np.float32]]
NUM_RANKS = 10
UNKNOWN_RATE, RANK_DECAY, DEPTH_DECAY = 0.5, 0.35, 0.7
"""Where a file does not tell how often its choices are right: the first head's first, and how it falls."""


class MedusaDrafter(Drafter):
    """Drafts with Medusa heads that were trained for the target."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options of `medusa`.

        Args:
            path: a file that `sakiyomi train medusa` made, or the folder of published heads; None takes those that
                come with the package for the target.
            num_speculative_tokens: heads asked at most, the depth of a draft.
            width: children of a node of a dynamic tree; 1 drafts chains.
            tree: "dynamic", or "static" for one layout at every step (chains and coupled or greedy drafts alone).
            max_nodes: nodes of a tree at most.
            min_confidence: what is believed with less is not drafted.
            draw: "coupled", "independent" or "argmax"; "auto" takes what the verifier asks for.
        """

        path: str | None = None
        num_speculative_tokens: int = 4
        width: int = 1
        tree: Literal["dynamic", "static"] = "dynamic"
        max_nodes: int = 8
        min_confidence: float = 0.0
        draw: Literal["auto", "coupled", "independent", "argmax"] = "auto"

        def __post_init__(self) -> None:
            check_growth(self)
            if self.tree not in ("dynamic", "static"):
                raise ParameterError(f"tree={self.tree!r} is not allowed; give dynamic or static.")

    def __init__(self, config: Config, context: DrafterContext, randomness: Randomness | None = None) -> None:
        info, lent = context.target.info, context.target.lend()
        if lent is None or context.open_drafter is None:
            raise ParameterError(
                f"the drafter medusa needs a target that lends its weights, and {info.name} has none to lend; take a "
                "drafter that needs no training, such as suffix."
            )
        self.config = config
        self.draw: DrawMode = context.draw if config.draw == "auto" else config.draw
        self.randomness = randomness or KeyedRandomness()
        stored = context.open_drafter(("medusa",), config.path)
        vocabulary = stored.vocabulary
        shared = lent.head if vocabulary is None else lent.ops.select_rows(lent.head, vocabulary)
        self.net = MedusaHeads.load(MedusaConfig.read(stored), stored.tensors, lent, shared)
        self.taps = (info.num_layers,)
        self.vocab_size = info.vocab_size
        self.ids = np.arange(info.vocab_size) if vocabulary is None else vocabulary.astype(np.int64)
        self.sharpness = float(stored.config.get("sharpness", 1.0))
        self.rules = GreedyRules(
            ids=self.ids,
            sharpness=self.sharpness,
            width=config.width,
            lowest=log_confidence(config.min_confidence),
        )
        self.depth = min(config.num_speculative_tokens, self.net.config.num_heads)
        rates = stored.config.get("rank_rates") or _unknown_rates(self.depth)
        self.layout = lay_out_tree([list(row) for row in rates][: self.depth], config.max_nodes)

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        rooms = [self._find_room(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]
        return fill_in(
            self._draft_at_once(sequences, rooms),
            lambda late: self._draft_by_levels([sequences[i] for i in late], [rooms[i] for i in late]),
        )

    def _draft_at_once(self, sequences: Seq[Sequence], rooms: Seq[DraftRoom]) -> list[Draft | None]:
        return draft_at_once(sequences, rooms, self.draw, None if self.config.tree == "static" else self._draft_best)

    def _draft_best(self, sequences: Seq[Sequence], rooms: Seq[DraftRoom]) -> list[Draft | None]:
        return self.net.draft(join_rows([sequence.memo.state for sequence in sequences]), self.rules, rooms)

    def _draft_by_levels(self, sequences: Seq[Sequence], rooms: Seq[DraftRoom]) -> list[Draft]:
        states = join_rows([sequence.memo.state for sequence in sequences])
        features = self.net.features(states, max(room.max_depth for room in rooms))
        logits = [self.net.ops.to_numpy(part) for part in self.net.logits(features)]
        return [
            self._grow(sequence, room, [part[row] for part in logits])
            for row, (sequence, room) in enumerate(zip(sequences, rooms, strict=True))
        ]

    def observe(self, sequence: Sequence, start: int, tokens: Seq[int], taps: Array | None) -> None:
        # A memo is never changed, so that sequences that fork may share it.
        if taps is not None and len(tokens):
            sequence.memo = _Memo(start + len(tokens), taps[len(tokens) - 1 : len(tokens)])

    def rewind(self, sequence: Sequence, length: int) -> None:
        if isinstance(sequence.memo, _Memo) and sequence.memo.length > length:
            sequence.memo = None

    def fork(self, sequence: Sequence) -> _Memo | None:
        return sequence.memo if isinstance(sequence.memo, _Memo) else None

    def _find_room(self, sequence: Sequence, budget: int) -> DraftRoom:
        memo, config = sequence.memo, self.config
        is_ready = isinstance(memo, _Memo) and memo.length == len(sequence.tokens) - 1
        is_chain = config.width == 1 and config.tree == "dynamic"
        return DraftRoom(
            max_depth=min(budget, self.depth) if is_ready else 0,
            max_nodes=min(budget, self.depth if is_chain else config.max_nodes),
            end_ids=sequence.end_ids,
        )

    def _grow(self, sequence: Sequence, room: DraftRoom, logits: Seq[Row]) -> Draft:
        config = self.config
        growth = Growth(
            sequence,
            self.draw,
            self.randomness,
            width=config.width if config.tree == "dynamic" else NUM_RANKS,
            max_depth=room.max_depth,
            max_nodes=room.max_nodes,
            min_confidence=config.min_confidence,
        )
        rows = [SubsetCandidates(row, self.ids, self.vocab_size, self.sharpness) for row in logits]
        if self.config.tree == "static" and not growth.is_sampled:
            growth.lay_out(self.layout, rows)
        depth = 0
        while growth.frontier:
            for node in growth.frontier:
                growth.add(node, rows[depth])
            growth.go_on()
            depth += 1
        return growth.draft() if len(growth.tree) else Draft.empty()


def lay_out_tree(rates: Seq[Seq[float]], max_nodes: int) -> tuple[RankPath, ...]:
    """The static tree of `max_nodes` nodes that is expected to be accepted longest, as paths of ranks.

    A path (1, 0) is the first choice of the second head below the second choice of the first. Its worth is the product
    of the rates at which these choices are right, the heads taken as independent; since the worth falls along both
    neighbours - one rank further, one head deeper - taking the best neighbour each time is optimal.

    Args:
        rates: for each head how often its first, second, ... choice is right.
    """
    taken: list[RankPath] = []
    heap: list[tuple[float, int, RankPath]] = [(-rates[0][0], 1, (0,))] if rates and rates[0] else []
    while heap and len(taken) < max_nodes:
        worth, depth, path = heapq.heappop(heap)
        taken.append(path)
        last, row = path[-1], rates[depth - 1]
        if last + 1 < len(row) and row[last] > 0:
            heapq.heappush(heap, (worth / row[last] * row[last + 1], depth, (*path[:-1], last + 1)))
        if depth < len(rates):
            heapq.heappush(heap, (worth * rates[depth][0], depth + 1, (*path, 0)))
    return tuple(sorted(taken, key=lambda path: (len(path), path)))


@dataclass(frozen=True, slots=True)
class _Memo:
    """The target's last hidden state [1, H] at the last of `length` positions."""

    length: int
    state: Array


def _unknown_rates(num_heads: int) -> list[list[float]]:
    return [
        [UNKNOWN_RATE * DEPTH_DECAY**head * RANK_DECAY**rank for rank in range(NUM_RANKS)] for head in range(num_heads)
    ]
