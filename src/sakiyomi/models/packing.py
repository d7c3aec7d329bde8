"""Packing the spans of several sequences into one call of a network, and splitting its result again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from sakiyomi.cache import KVCache
from sakiyomi.errors import ContextLengthError, ParameterError
from sakiyomi.nets.decoder import Decoder
from sakiyomi.ops.base import THE_BEST_ROW, Ops, Past, RowChoice, Tree
from sakiyomi.sampling.choose import bare_choice, choose
from sakiyomi.tree import Computed
from sakiyomi.types import Array, BareChoice, History, ModelInfo, Span


@dataclass(frozen=True, slots=True)
class PackedSpans:
    """Spans under one another.

    Attributes:
        token_ids, positions, parents: R integers; parents count from the start of the row's own span.
        bounds: B+1 row offsets of the spans.
        logit_rows: rows of the call whose logits are wanted, span by span.
        taps: every layer number that some span asks for, ascending.
    """

    token_ids: Sequence[int]
    positions: Sequence[int]
    parents: Sequence[int]
    bounds: tuple[int, ...]
    logit_rows: Sequence[int]
    taps: tuple[int, ...]

    @property
    def mask(self) -> Tree:
        return Tree(self.parents, self.bounds)


def pack_spans(spans: Sequence[Span], info: ModelInfo) -> PackedSpans:
    """Check the spans and lay them under one another; caches are not touched.

    Raises:
        ParameterError: an empty span, ids, parents, logit rows or taps out of range, or one cache in two spans.
        ContextLengthError: a row behind the model's context.
    """
    if len(spans) > 1 and len({id(span.cache) for span in spans}) < len(spans):
        raise ParameterError("two spans of one forward pass share a cache; give each sequence its own.")
    token_ids: list[int] = []
    positions: list[int] = []
    parents: list[int] = []
    logit_rows: list[int] = []
    bounds = [0]
    for span in spans:
        positions += check_span(span, info)
        logit_rows += [len(token_ids) + row for row in span.logit_rows]
        token_ids += span.tokens
        parents += span.parents
        bounds.append(len(token_ids))
    taps = tuple(sorted({tap for span in spans for tap in span.taps}))
    return PackedSpans(token_ids, positions, parents, tuple(bounds), logit_rows, taps)


def find_choices(spans: Sequence[Span], packed: PackedSpans) -> list[RowChoice]:
    """How the asked rows choose their tokens, where all spans that have some tell; else none."""
    owners = [span.choice for span in spans for _ in span.logit_rows]
    choices = [
        _at(choice, packed.positions[row] + 1)
        for choice, row in zip(owners, packed.logit_rows, strict=True)
        if choice is not None
    ]
    return choices if len(choices) == len(owners) else []


def _at(choice: BareChoice, position: int) -> RowChoice:
    return RowChoice(*choice, position) if choice.temperature else THE_BEST_ROW


class AskedRows:
    """The rows of a pass that the head is for, span under span: what it makes of them is made once, for all of them.

    Logits are made when the first row of them is asked for. Where the best or the chosen ids are enough, the ops may
    find these faster without.
    """

    def __init__(
        self,
        ops: Ops,
        make_logits: Callable[[], Array],
        find_best: Callable[[], npt.NDArray[np.int64]] | None = None,
        choices: Sequence[RowChoice] = (),
        chosen: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self.ops = ops
        self._make_logits = make_logits
        self._find_best = find_best
        self._logits: Array | None = None
        self._best: list[int] | None = None
        self._choices = choices
        self._chosen: list[int] = [] if chosen is None else chosen.tolist()

    @classmethod
    def of_logits(cls, ops: Ops, logits: Array) -> AskedRows:
        """Rows whose logits [R, V], in arrays of `ops`, are there already."""
        return cls(ops, lambda: logits)

    @classmethod
    def of_states(
        cls,
        decoder: Decoder,
        states: Array,
        choices: Sequence[RowChoice] = (),
        chosen: npt.NDArray[np.int64] | None = None,
    ) -> AskedRows:
        """Rows given by the states [R, H] behind a decoder's last layer, and what they chose [R] where known."""
        if decoder.ops.has_best_ids:
            return cls(decoder.ops, partial(decoder.logits, states), partial(decoder.best_ids, states), choices, chosen)
        return cls.of_logits(decoder.ops, decoder.logits(states))

    @property
    def logits(self) -> Array:
        """All logits [R, V]."""
        if self._logits is None:
            self._logits = self._make_logits()
        return self._logits

    def find(self, i: int, choice: RowChoice) -> int | None:
        """The id that the i-th row chooses, or None where only the logits can tell."""
        if self._find_best is None or self._logits is not None:
            return None
        if self._chosen and self._choices[i] == choice:
            token = self._chosen[i]
        elif choice == THE_BEST_ROW:
            if self._best is None:
                self._best = self._find_best().tolist()
            token = self._best[i]
        else:
            return None
        return token if token >= 0 else None


class SpanOutput:
    """Result of a forward pass for one span (`types.Output`): rows become numpy arrays when they are asked for.

    Args:
        rows: the asked rows of the pass, of which those from `first` to `end` - 1 are the span's own; None: it asked
            for none.
        taps: [M, T * H] in arrays of the ops, or None.
        computed: of a shallow model: what it has made of the rows.
    """

    def __init__(
        self, rows: AskedRows | None, first: int, end: int, taps: Array | None, computed: Computed | None = None
    ) -> None:
        self._rows = rows
        self._first = first
        self._end = end
        self.taps = taps
        self.computed = computed

    def row(self, i: int) -> npt.NDArray[np.float32]:
        """Logits [V] of the i-th asked row."""
        rows = self._asked()
        return rows.ops.to_numpy(rows.logits[range(self._first, self._end)[i]])

    def argmax(self) -> list[int]:
        """The lowest id with the largest logit, for each asked row."""
        if self._rows is None:
            return []
        best = [self._rows.find(i, THE_BEST_ROW) for i in range(self._first, self._end)]
        known = [token for token in best if token is not None]
        if len(known) == len(best):
            return known
        return [int(token) for token in self._rows.ops.argmax(self._rows.logits[self._first : self._end])]

    def choose(self, i: int, history: History) -> int:
        """The token that plain decoding chooses from the i-th asked row."""
        choice = bare_choice(history)
        if choice is not None:
            token = self._asked().find(range(self._first, self._end)[i], _at(choice, history.position))
            if token is not None:
                return token
        return int(choose(self.row(i), history))

    def _asked(self) -> AskedRows:
        if self._rows is None:
            raise ParameterError("this span asked for no logits; name the rows in logit_rows.")
        return self._rows


def own_caches(spans: Sequence[Span], num_layers: int, num_kv_heads: int, head_dim: int) -> list[KVCache]:
    """The spans' caches, if a model of this shape can write there.

    Raises:
        ParameterError: a cache of another model.
    """
    caches = []
    for span in spans:
        cache = span.cache
        if not isinstance(cache, KVCache) or not cache.fits(num_layers, num_kv_heads, head_dim):
            raise ParameterError("a span holds a cache of another model; take caches from this model's new_cache().")
        caches.append(cache)
    return caches


def make_room(caches: Sequence[KVCache], spans: Sequence[Span]) -> Past:
    """Reserve each span's rows in its cache and return the caches as the ops see them."""
    for cache, span in zip(caches, spans, strict=True):
        cache.reserve(len(span.tokens))
    return Past([cache.slots() for cache in caches])


def split_result(
    ops: Ops, spans: Sequence[Span], packed: PackedSpans, rows: AskedRows | None, taps: Array | None
) -> list[SpanOutput]:
    """One output per span from the asked rows and the taps [R, T * H] of the call."""
    outputs = []
    first = 0
    for span, start, stop in zip(spans, packed.bounds, packed.bounds[1:], strict=False):
        end = first + len(span.logit_rows)
        own_taps = None if taps is None or not span.taps else _own_taps(ops, span.taps, packed.taps, taps[start:stop])
        outputs.append(SpanOutput(rows if end > first else None, first, end, own_taps))
        first = end
    return outputs


def _own_taps(ops: Ops, wanted: Sequence[int], packed: Sequence[int], taps: Array) -> Array:
    if tuple(wanted) == tuple(packed):
        return taps
    width = taps.shape[1] // len(packed)
    columns = [packed.index(tap) * width for tap in wanted]
    return ops.concat([taps[:, column : column + width] for column in columns])


def check_span(span: Span, info: ModelInfo) -> list[int]:
    """Positions of the rows of a span that can be run."""
    num_rows = len(span.tokens)
    if num_rows == 0 or len(span.parents) != num_rows:
        raise ParameterError(
            f"a span has {num_rows} tokens and {len(span.parents)} parents; give one token or more, each with a parent."
        )
    if min(span.tokens) < 0 or max(span.tokens) >= info.vocab_size:
        bad = next(token for token in span.tokens if not 0 <= token < info.vocab_size)
        raise ParameterError(f"id {bad} is not in the vocabulary; ids are 0 to {info.vocab_size - 1}.")
    previous = -1
    for row in span.logit_rows:
        if not previous < row < num_rows:
            raise ParameterError(f"logit row {row} is not allowed; rows are 0 to {num_rows - 1} and ascend.")
        previous = row
    for tap in span.taps:
        if not 0 <= tap <= info.num_layers:
            raise ParameterError(f"tap {tap} is not allowed; the model has layers 0 to {info.num_layers}.")
    return _positions(span, info)


def _positions(span: Span, info: ModelInfo) -> list[int]:
    first = span.cache.length
    positions: list[int] = []
    for row, parent in enumerate(span.parents):
        if not -1 <= parent < row:
            raise ParameterError(f"row {row} has parent {parent}; a parent comes before its children, -1 is the cache.")
        positions.append(first if parent < 0 else positions[parent] + 1)
    if max(positions) >= info.max_model_len:
        raise ContextLengthError(
            f"position {max(positions)} is behind the context of {info.max_model_len} positions; shorten the prompt."
        )
    return positions
