"""An EAGLE head at work beside a target: its cache, and the rows that wait for it.

The cache holds one row per position whose successor is known, each made from features of the target. Rows of drafts are
temporary: rows that keep a head's own guesses in place of the target's features cost a tenth of the accepted length.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from sakiyomi.cache import KVCache
from sakiyomi.errors import ParameterError
from sakiyomi.nets.binding import resolve_taps
from sakiyomi.nets.eagle3 import EagleConfig, EagleHead
from sakiyomi.ops.base import Causal, DraftRoom, GreedyRules, Mask, Ops, Past
from sakiyomi.tree import Draft
from sakiyomi.types import Array, DrafterContext, Sequence

CHUNK = 256
"""Rows that may wait before they are fed; bounds what a long prompt holds."""

MAX_LOGIT_ROWS = 64
"""Longer runs are of a prompt, of which only the last row's logits are looked at."""

Ints = npt.NDArray[np.int32]


@dataclass
class HeadMemo:
    """What a head keeps for one sequence.

    Attributes:
        waiting: the target's hidden states [rows, A * Ht] of the positions behind the cache, in order.
        last: of the cache's last row what `HeadRunner.run` gives: the logits [1, K] and the state to feed back [1, H].
        is_whole: whether no position was missed.
    """

    cache: KVCache
    waiting: list[Array] = field(default_factory=list)
    last: tuple[Array, Array] | None = None
    is_whole: bool = True

    @property
    def num_waiting(self) -> int:
        return sum(len(taps) for taps in self.waiting)

    def fork(self) -> HeadMemo:
        """An independent copy."""
        return HeadMemo(self.cache.fork(), list(self.waiting), self.last, self.is_whole)


class HeadRunner:
    """Feeds rows to a head.

    Args:
        max_length: positions of the target's context.
        lm_head: the language-model head [K, H]; without one, what it would read stands for the logits everywhere.
    """

    def __init__(self, head: EagleHead, max_length: int, lm_head: Any = None) -> None:
        self.head = head
        self.ops = head.ops
        self._lm_head = lm_head
        self._max_length = max_length

    def new_memo(self) -> HeadMemo:
        """An empty state."""
        config = self.head.config
        cache = KVCache(self.ops, config.num_layers, config.num_kv_heads, config.head_dim, max_length=self._max_length)
        return HeadMemo(cache)

    def observe(self, memo: HeadMemo, sequence: Sequence, start: int, taps: Array | None) -> None:
        """Take the hidden states of committed positions from `start` on; each one's successor is known."""
        expected = memo.cache.length + memo.num_waiting
        if taps is None or start != expected:
            memo.is_whole = memo.is_whole and taps is not None and len(taps) == 0
            return
        memo.waiting.append(taps)
        if memo.num_waiting >= CHUNK:
            self.catch_up([memo], [sequence])

    def rewind(self, memo: HeadMemo, length: int) -> None:
        """Keep only the rows whose own token, the one behind their position, is among the first `length`."""
        kept = max(length - 1, 0)
        excess = memo.cache.length + memo.num_waiting - kept
        while excess > 0 and memo.waiting:
            taps = memo.waiting.pop()
            if len(taps) > excess:
                memo.waiting.append(taps[: len(taps) - excess])
            excess -= len(taps)
        if memo.cache.length > kept:
            memo.cache.truncate(kept)
            memo.last = None

    def is_ready(self, memo: HeadMemo, sequence: Sequence) -> bool:
        """Whether every position in front of the last token has its row or waits for it."""
        held = memo.cache.length + memo.num_waiting
        is_known = memo.num_waiting > 0 or memo.last is not None
        return memo.is_whole and is_known and held == len(sequence.tokens) - 1

    def catch_up(self, memos: Seq[HeadMemo], sequences: Seq[Sequence]) -> None:
        """Feed all waiting rows."""
        late = [(memo, sequence) for memo, sequence in zip(memos, sequences, strict=True) if memo.waiting]
        if late:
            self._feed([memo for memo, _ in late], [sequence for _, sequence in late], 0)

    def draft(
        self, memos: Seq[HeadMemo], sequences: Seq[Sequence], rules: GreedyRules, rooms: Seq[DraftRoom]
    ) -> list[Draft | None]:
        """Feed all waiting rows, and grow drafts of the most probable tokens behind them in the same call.

        Args:
            rules: of width 1, but for P-EAGLE.

        Returns:
            The drafts; None for those that have to be grown level by level.
        """
        counts = [memo.num_waiting for memo in memos]
        if self._lm_head is None or min(counts) == 0 or sum(counts) > MAX_LOGIT_ROWS:
            return [None] * len(memos)
        tokens: list[int] = []
        for memo, sequence, count, room in zip(memos, sequences, counts, rooms, strict=True):
            first = memo.cache.length + 1
            tokens += sequence.tokens[first : first + count]
            memo.cache.reserve(count + room.max_depth - 1)
        found = self.head.draft(
            np.array(tokens, np.int32),
            join_rows([taps for memo in memos for taps in memo.waiting]),
            Past([memo.cache.slots() for memo in memos]),
            Causal((0, *accumulate(counts))),
            self._lm_head,
            rules,
            rooms,
        )
        if found is None:
            return [None] * len(memos)
        drafts, logits, states = found
        for i, (memo, count) in enumerate(zip(memos, counts, strict=True)):
            memo.cache.keep(range(count))
            memo.waiting.clear()
            memo.last = (logits[i : i + 1], states[i : i + 1])
        return drafts

    def look_ahead(self, memos: Seq[HeadMemo], sequences: Seq[Sequence], num_ahead: int) -> list[Array]:
        """Feed all waiting rows and behind them placeholder rows, as P-EAGLE drafts; those are dropped again.

        Returns:
            For each sequence the logits of its last row and of the placeholders [1 + num_ahead, K].
        """
        return self._feed(memos, sequences, num_ahead)

    def _feed(self, memos: Seq[HeadMemo], sequences: Seq[Sequence], num_ahead: int) -> list[Array]:
        counts = [memo.num_waiting for memo in memos]
        if sum(counts) + num_ahead == 0:
            return [memo.last[0] for memo in memos if memo.last is not None]
        rows = [_Rows.of(memo, sequence, num_ahead, self.head) for memo, sequence in zip(memos, sequences, strict=True)]
        bounds = (0, *accumulate(len(part.token_ids) for part in rows))
        starts = [first + max(count - 1, 0) for first, count in zip(bounds, counts, strict=False)]
        logits, states = self.run(
            memos,
            join_rows([part.token_ids for part in rows]),
            join_rows([part.features for part in rows if len(part.token_ids)]),
            join_rows([part.positions for part in rows]),
            Causal(bounds),
            bounds,
            [row for start, end in zip(starts, bounds[1:], strict=True) for row in range(start, end)],
        )
        results, at = [], 0
        for memo, start, count, end in zip(memos, starts, counts, bounds[1:], strict=True):
            memo.cache.keep(range(count))
            memo.waiting.clear()
            found = logits[at : at + end - start]
            at += end - start
            if count:
                memo.last = (found[:1], states[start : start + 1])
                results.append(found)
                continue
            assert memo.last is not None, "a head begins with a row of the target's"
            results.append(join_rows([memo.last[0], found]) if num_ahead else memo.last[0])
        return results

    def run(
        self,
        memos: Seq[HeadMemo],
        token_ids: Ints,
        features: Array,
        positions: Ints,
        mask: Mask,
        bounds: Seq[int],
        wanted: list[int] | None = None,
    ) -> tuple[Array, Array]:
        """Run packed rows behind the caches, where they stay pending.

        Returns:
            The logits of the `wanted` rows (None: of all), and the states to feed back [R, H].
        """
        for memo, first, end in zip(memos, bounds, bounds[1:], strict=False):
            memo.cache.reserve(end - first)
        past = Past([memo.cache.slots() for memo in memos])
        head, num_rows = self._lm_head, len(token_ids)
        rows = slice(None) if wanted is None or len(wanted) == num_rows else wanted
        if head is not None and num_rows <= MAX_LOGIT_ROWS:
            _, states, logits = self.head.forward_to_logits(token_ids, features, positions, past, mask, head)
            return logits[rows], states
        read, states = self.head.forward(token_ids, features, positions, past, mask)
        return read[rows] if head is None else self.ops.linear(read[rows], head), states


@dataclass(frozen=True, slots=True)
class _Rows:
    """The waiting rows of one sequence, and placeholders behind them."""

    token_ids: Ints
    positions: Ints
    features: Array

    @classmethod
    def of(cls, memo: HeadMemo, sequence: Sequence, num_ahead: int, head: EagleHead) -> _Rows:
        start, count = memo.cache.length, memo.num_waiting
        tokens = [*sequence.tokens[start + 1 : start + 1 + count], *[head.config.mask_token_id or 0] * num_ahead]
        parts = [head.fuse(join_rows(memo.waiting))] if count else []
        if num_ahead:
            parts.append(head.placeholders(num_ahead))
        positions = np.arange(start, start + len(tokens), dtype=np.int32)
        return cls(np.array(tokens, np.int32), positions, join_rows(parts) if parts else None)


@dataclass(frozen=True)
class Head:
    """A stored head made ready beside its target.

    Attributes:
        head: the language-model head [K, H], its own or rows of the target's.
        ids: int64 [K], the ascending ids that it drafts.
        vocab_size: V.
        sharpness: factor on the logits from which greedy choices take their confidences.
    """

    net: EagleHead
    head: Any
    taps: tuple[int, ...]
    ids: npt.NDArray[np.int64]
    vocab_size: int
    sharpness: float

    def new_runner(self, max_length: int) -> HeadRunner:
        """What feeds it, over a context of `max_length` positions."""
        return HeadRunner(self.net, max_length, self.head)


def open_head(kinds: tuple[str, ...], path: str | None, context: DrafterContext) -> Head:
    """The head of one of `kinds` for the target.

    Raises:
        ParameterError: a target that lends no weights, or none packaged for it.
        CheckpointError: a file that is damaged or made for another model.
    """
    lent, info = context.target.lend(), context.target.info
    if lent is None or context.open_drafter is None:
        raise ParameterError(
            f"the drafter {kinds[0]} needs a target that lends its weights, and {info.name} has none to lend; take a "
            "drafter that needs no training, such as suffix."
        )
    stored = context.open_drafter(kinds, path)
    ops: Ops = lent.ops
    own, vocabulary = stored.tensors.get("lm_head.weight"), stored.vocabulary
    lent_head = lent.head if vocabulary is None or own is not None else ops.select_rows(lent.head, vocabulary)
    return Head(
        net=EagleHead.load(EagleConfig.read(stored), stored.tensors, lent),
        head=lent_head if own is None else ops.weight(own),
        taps=resolve_taps(stored, info.num_layers),
        ids=np.arange(info.vocab_size) if vocabulary is None else vocabulary.astype(np.int64),
        vocab_size=info.vocab_size,
        sharpness=float(stored.config.get("sharpness", 1.0)),
    )


def join_rows(parts: Seq[Array]) -> Array:
    """Arrays [rows, N] under one another, numpy's or torch's."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(list(parts))
    joined = parts[0].new_empty((sum(len(part) for part in parts), parts[0].shape[1]))
    first = 0
    for part in parts:
        joined[first : first + len(part)] = part
        first += len(part)
    return joined
