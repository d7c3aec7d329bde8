"""Models that take no mask of ours: a tree is run as its chains, and what is rejected leaves no trace.

Caches that can be cropped are cropped. A recurrent state cannot: the state before the pass is kept aside, and after a
rejection the accepted tokens are fed to it again in front of the next span. Some models cannot even feed several tokens
behind a state rightly; they are fed one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from sakiyomi.errors import ParameterError
from sakiyomi.models.hf.calls import Caller, copy_state, count_bytes
from sakiyomi.models.hf.trees import FOREIGN_CACHE, check_distinct, check_length, check_path
from sakiyomi.models.packing import AskedRows, SpanOutput, check_span
from sakiyomi.ops.torch import TorchOps
from sakiyomi.types import DraftShape, ModelInfo, Output, Span


@dataclass(frozen=True, slots=True)
class Manner:
    """How a model's state may be handled, as the probe found out.

    Attributes:
        crops: rows at the end can be dropped from a state.
        chunks: several tokens can be fed at once behind a state; from nothing on they always can.
    """

    crops: bool
    chunks: bool


class ChainRunner:
    """Runs spans one after the other, a tree as its chains."""

    def __init__(self, caller: Caller, manner: Manner) -> None:
        self.draft_shape: DraftShape = "chains" if manner.chunks else "none"
        self._caller = caller
        self._manner = manner
        self._ops = TorchOps(caller.dtype, caller.device)

    def new_cache(self, info: ModelInfo) -> ChainCache:
        return ChainCache(self._manner)

    def forward(self, spans: Sequence[Span], info: ModelInfo) -> list[Output]:
        check_distinct(spans)
        for span in spans:
            check_span(span, info)
            if not isinstance(span.cache, ChainCache):
                raise ParameterError(FOREIGN_CACHE)
        try:
            return [_SpanRun(self._caller, self._manner, span).run(info.vocab_size, self._ops) for span in spans]
        except BaseException:
            # Rows of a pass that broke off must never be committed.
            for span in spans:
                span.cache.keep(())
            raise


class ChainCache:
    """A sequence's tokens, and a state behind the first of them (`types.Cache`).

    Attributes:
        tokens: the committed ids.
        state: the model's state behind the first `num_fed` of them, None behind none.
        pending: the rows of the last pass, or None.
    """

    def __init__(self, manner: Manner) -> None:
        self.tokens: list[int] = []
        self.state: Any = None
        self.num_fed = 0
        self.pending: _Pending | None = None
        self._manner = manner

    @property
    def length(self) -> int:
        """Committed positions."""
        return len(self.tokens)

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return count_bytes(self.state)

    def expect(self, length: int) -> None:
        """The states of transformers make room as they like."""

    def keep(self, path: Sequence[int]) -> None:
        """Commit rows of the last forward pass; what a state has seen beyond them is undone.

        Raises:
            ParameterError: a row that the pass did not have, or rows that are no path; nothing is changed.
        """
        pending = self.pending
        check_path(path, 0 if pending is None else len(pending.tokens))
        if pending is not None and path:
            pending.check(path)
            self.state, num_rows = pending.resume(tuple(path), self._manner, (self.state, self.num_fed - self.length))
            self.num_fed = self.length + num_rows
            self.tokens += [pending.tokens[row] for row in path]
        self.pending = None

    def truncate(self, length: int) -> None:
        """Forget every position from `length` on. A state that cannot be cropped is fed anew by the next pass."""
        check_length(length, self.length)
        del self.tokens[length:]
        self.pending = None
        if self.num_fed > length:
            # What has left a window does not come back.
            if self._manner.crops and length > 0 and not any(self.state.is_sliding):
                self.state.crop(length - self.num_fed)
                self.num_fed = length
            else:
                self.state, self.num_fed = None, 0

    def fork(self) -> ChainCache:
        """An independent copy of the committed positions."""
        copy = ChainCache(self._manner)
        copy.tokens = list(self.tokens)
        copy.state, copy.num_fed = copy_state(self.state), self.num_fed
        return copy


@dataclass(slots=True)
class _Pending:
    """What a pass left behind.

    Attributes:
        tokens, parents: those of the span.
        states: states behind rows, by the path of rows that they have seen.
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    states: dict[tuple[int, ...], Any]

    def check(self, path: Sequence[int]) -> None:
        for row, parent in zip(path, (-1, *path), strict=False):
            if self.parents[row] != parent:
                raise ParameterError(f"row {row} is not below row {parent}; only one path of a span can be kept.")

    def resume(self, path: tuple[int, ...], manner: Manner, before: tuple[Any, int]) -> tuple[Any, int]:
        """A state to go on from after `path`, and how many rows of the path it has seen (below 0: the one before)."""
        if manner.crops:
            for rows, state in self.states.items():
                if rows[: len(path)] == path:
                    state.crop(len(path) - len(rows))
                    return state, len(path)
        for count in range(len(path), 0, -1):
            if path[:count] in self.states:
                return self.states[path[:count]], count
        return before


class _SpanRun:
    """One span on its way through the model."""

    def __init__(self, caller: Caller, manner: Manner, span: Span) -> None:
        assert isinstance(span.cache, ChainCache)
        self._caller = caller
        self._manner = manner
        self._span = span
        self._cache = span.cache
        self._pending = _Pending(span.tokens, span.parents, {})
        self._logits: dict[int, Tensor] = {}
        self._taps: dict[int, Tensor] = {}

    def run(self, vocab_size: int, ops: TorchOps) -> Output:
        span = self._span
        # Where tokens are best fed at once from the start, a prompt waits until something of it is asked for.
        if self._manner.chunks or span.logit_rows or span.taps:
            self._run_rows()
        self._cache.pending = self._pending
        logits = [self._logits[row][:vocab_size] for row in span.logit_rows]
        taps = [self._taps[row] for row in range(len(span.tokens))] if span.taps else None
        rows = AskedRows.of_logits(ops, torch.stack(logits)) if logits else None
        return SpanOutput(rows, 0, len(logits), None if taps is None else torch.stack(taps))

    def _run_rows(self) -> None:
        cache = self._cache
        state, late = copy_state(cache.state), cache.tokens[cache.num_fed :]
        if state is None and self._manner.crops:
            state = DynamicCache(config=self._caller.config)
        leaves = [row for row in range(len(self._span.tokens)) if row not in self._span.parents]
        chains = [_path_to(self._span.parents, leaf) for leaf in leaves]
        stem = self._stem(chains, bool(late))
        if late or stem:
            state = self._feed(state, late, (), stem)
        for chain in chains:
            if len(chain) > len(stem):
                self._feed(copy_state(state), (), stem, chain[len(stem) :])

    def _stem(self, chains: Sequence[tuple[int, ...]], is_late: bool) -> tuple[int, ...]:
        """The rows that are fed first: what all chains share, or what is sure to be kept if it pays to stop there."""
        shared = min(chains, key=len)
        while any(chain[: len(shared)] != shared for chain in chains):
            shared = shared[:-1]
        if len(chains) == 1 and self._manner.crops:
            return shared
        if len(chains) == 1 and self._manner.chunks and not is_late:
            return ()
        # Draft nodes stand behind the first row whose logits are asked for; a pass over the rest needs no undoing.
        sure = self._span.logit_rows[0] + 1 if self._span.logit_rows else len(shared)
        return shared[:sure]

    def _feed(self, state: Any, late: Sequence[int], above: tuple[int, ...], rows: Sequence[int]) -> Any:
        """Feed late tokens and then rows, which stand below the rows `above`, and note the state behind them."""
        tokens = [*late, *(self._span.tokens[row] for row in rows)]
        places = [-1] * len(late) + list(rows)
        at_once = len(tokens) if self._manner.chunks or state is None else 1
        for start in range(0, len(tokens), at_once):
            part = places[start : start + at_once]
            state = self._call(state, tokens[start : start + at_once], part)
            seen = sum(place >= 0 for place in places[: start + at_once])
            if seen:
                # With the last rows fed one by one, the state goes on changing: a copy stays.
                is_last = start + at_once >= len(tokens)
                self._pending.states[(*above, *rows[:seen])] = state if is_last else copy_state(state)
        return state

    def _call(self, state: Any, tokens: Sequence[int], places: Sequence[int]) -> Any:
        wanted = [i for i, row in enumerate(places) if row in self._span.logit_rows and row not in self._logits]
        if self._manner.crops:
            record_past(state)
        logits, taps, state = self._caller(tokens, state, wanted, self._span.taps)
        for index, i in enumerate(wanted):
            assert logits is not None
            self._logits[places[i]] = logits[index]
        if taps is not None:
            self._taps |= {row: taps[i] for i, row in enumerate(places) if row >= 0}
        return state


def record_past(state: Any) -> None:
    """Let a cache with windows keep what leaves them until it is cropped."""
    getattr(state, "activate_past_recording", lambda: None)()


def _path_to(parents: Sequence[int], row: int) -> tuple[int, ...]:
    path: list[int] = []
    while row >= 0:
        path.append(row)
        row = parents[row]
    return tuple(reversed(path))
