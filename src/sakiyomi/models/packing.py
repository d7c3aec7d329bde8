"""Packing the spans of several sequences into one call of a network, and splitting its result again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sakiyomi.cache import KVCache
from sakiyomi.errors import ContextLengthError, ParameterError
from sakiyomi.ops.base import Ops, Past, Tree
from sakiyomi.sampling.choose import choose
from sakiyomi.tree import Computed
from sakiyomi.types import Array, History, ModelInfo, Span


@dataclass(frozen=True, slots=True)
class PackedSpans:
    """Spans under one another.

    Attributes:
        token_ids, positions, parents: int32 [R]; parents count from the start of the row's own span.
        bounds: B+1 row offsets of the spans.
        logit_rows: rows of the call whose logits are wanted, span by span.
        taps: every layer number that some span asks for, ascending.
    """

    token_ids: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    parents: npt.NDArray[np.int32]
    bounds: tuple[int, ...]
    logit_rows: tuple[int, ...]
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
    if len({id(span.cache) for span in spans}) < len(spans):
        raise ParameterError("two spans of one forward pass share a cache; give each sequence its own.")
    bounds, positions, logit_rows = [0], [], []
    for span in spans:
        positions += check_span(span, info)
        logit_rows += [bounds[-1] + row for row in span.logit_rows]
        bounds.append(bounds[-1] + len(span.tokens))
    return PackedSpans(
        token_ids=np.array([token for span in spans for token in span.tokens], np.int32),
        positions=np.array(positions, np.int32),
        parents=np.array([parent for span in spans for parent in span.parents], np.int32),
        bounds=tuple(bounds),
        logit_rows=tuple(logit_rows),
        taps=tuple(sorted({tap for span in spans for tap in span.taps})),
    )


class SpanOutput:
    """Result of a forward pass for one span (`types.Output`): rows become numpy arrays when they are asked for.

    Args:
        logits: [len(span.logit_rows), V] in arrays of `ops`, or None.
        taps: [M, T * H] in arrays of `ops`, or None.
        computed: of a shallow model: what it has made of the rows.
    """

    def __init__(self, ops: Ops, logits: Array | None, taps: Array | None, computed: Computed | None = None) -> None:
        self._ops = ops
        self._logits = logits
        self.taps = taps
        self.computed = computed

    def row(self, i: int) -> npt.NDArray[np.float32]:
        """Logits [V] of the i-th asked row."""
        return self._ops.to_numpy(self._asked()[i])

    def argmax(self) -> list[int]:
        """The lowest id with the largest logit, for each asked row."""
        return [] if self._logits is None else [int(token) for token in self._ops.argmax(self._logits)]

    def choose(self, i: int, history: History) -> int:
        """The token that plain decoding chooses from the i-th asked row."""
        return int(choose(self.row(i), history))

    def _asked(self) -> Array:
        if self._logits is None:
            raise ParameterError("this span asked for no logits; name the rows in logit_rows.")
        return self._logits


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
    ops: Ops, spans: Sequence[Span], packed: PackedSpans, logits: Array | None, taps: Array | None
) -> list[SpanOutput]:
    """One output per span from the logits [len(packed.logit_rows), V] and taps [R, T * H] of the call."""
    outputs = []
    first_logit = 0
    for span, start, stop in zip(spans, packed.bounds, packed.bounds[1:], strict=False):
        next_logit = first_logit + len(span.logit_rows)
        outputs.append(
            SpanOutput(
                ops,
                None if logits is None or next_logit == first_logit else logits[first_logit:next_logit],
                None if taps is None or not span.taps else _own_taps(ops, span.taps, packed.taps, taps[start:stop]),
            )
        )
        first_logit = next_logit
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
