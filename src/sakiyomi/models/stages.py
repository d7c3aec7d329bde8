"""A pass that goes on from what first layers have computed already: only the remaining layers run over those rows.

LayerSkip (Elhoushi et al., 2024) drafts with the first layers of a model and verifies with the others. A row is the
same bits on both ways, since it passes through the same layers with the same keys and values, only in two passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sakiyomi.cache import KVCache
from sakiyomi.models.packing import AskedRows, PackedSpans, SpanOutput
from sakiyomi.nets.decoder import Decoder
from sakiyomi.ops.base import Past, Tree
from sakiyomi.tree import Computed
from sakiyomi.types import Array, Span


def run_in_stages(
    decoder: Decoder, spans: Sequence[Span], packed: PackedSpans, caches: Sequence[KVCache], *, notes: bool
) -> list[SpanOutput]:
    """Run the spans, each from where its rows have come to.

    Args:
        notes: whether outputs and caches shall tell what the pass has computed, for a later one to go on from.
    """
    parts = [_Part(span, cache, *_find_done(decoder, span, cache)) for span, cache in zip(spans, caches, strict=True)]
    for part in parts:
        part.cache.reserve(part.num_rows, part.num_done)
    depth, leading = decoder.config.num_layers, decoder.num_leading
    states = _split(decoder.embed(_pick(packed.token_ids, _active_rows(parts, packed))), parts)
    start = 0
    for end in sorted({part.joins_at for part in parts if part.joins_at is not None} | {leading, depth}):
        taps = [tap for tap in packed.taps if start <= tap < end]
        states, tapped = _run_stage(decoder, states, start, end, parts, packed, taps)
        for i, part in enumerate(parts):
            part.taps |= {tap: rows[i] for tap, rows in zip(taps, tapped, strict=True)}
            if part.done is not None and part.joins_at == end:
                states[i] = decoder.ops.stack([part.done.hidden[: part.num_done], states[i]])
                part.first = 0
            if end == leading:
                part.early = states[i]
        start = end
    for part, state in zip(parts, states, strict=True):
        part.taps[depth] = state
    return _make_outputs(decoder, states, parts, notes)


@dataclass
class _Part:
    """One span of the pass.

    Attributes:
        done: what was computed of its first rows, if anything.
        num_done: how many these are.
        joins_at: the number of layers behind which these rows join the pass; None: never.
        first: the first row that takes part at the moment.
        early: the hidden states behind the decoder's leading layers.
    """

    span: Span
    cache: KVCache
    done: Computed | None
    num_done: int
    joins_at: int | None
    first: int = field(init=False)
    early: Array = None
    taps: dict[int, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.first = self.num_done

    @property
    def num_rows(self) -> int:
        return len(self.span.tokens)

    @property
    def num_active(self) -> int:
        return self.num_rows - self.first


def _find_done(decoder: Decoder, span: Span, cache: KVCache) -> tuple[Computed | None, int, int | None]:
    """What of the offer can be taken up: (it, number of rows, where they join)."""
    nothing = None, 0, None
    done = cache.find(span.computed)
    if done is None:
        return nothing
    num_done = _count_equal(done, span)
    is_own = done.layers == decoder.numbers
    joins_at: int | None = done.num_leading
    if is_own and done.num_leading < decoder.config.num_layers:
        # The rows have passed all layers of a decoder that skips some; their last state is gone.
        joins_at = None
        num_done = min(num_done, *span.logit_rows[:1], len(span.tokens))
    elif not is_own and done.num_leading > decoder.num_leading:
        return nothing
    if num_done == 0 or (span.taps and (joins_at is None or min(span.taps) < joins_at)):
        return nothing
    return done, num_done, joins_at


def _count_equal(done: Computed, span: Span) -> int:
    """How many rows of the span, from the first on, are those that were computed."""
    known = zip(done.tokens, done.parents, strict=True)
    asked = zip(span.tokens, span.parents, strict=True)
    count = 0
    for one, other in zip(known, asked, strict=False):
        if one != other:
            break
        count += 1
    return count


def _active_rows(parts: Sequence[_Part], packed: PackedSpans) -> npt.NDArray[np.int64]:
    """The rows of the call that take part at the moment."""
    ranges = zip(parts, packed.bounds, packed.bounds[1:], strict=False)
    return np.concatenate([np.arange(start + part.first, stop) for part, start, stop in ranges])


def _pick(values: Sequence[int], rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)[rows]


def _run_stage(
    decoder: Decoder,
    states: Sequence[Array],
    start: int,
    end: int,
    parts: Sequence[_Part],
    packed: PackedSpans,
    taps: Sequence[int],
) -> tuple[list[Array], list[list[Array]]]:
    """Layers `start` to `end` - 1 over the rows that take part: for each part their states, and those at each tap."""
    x, rows = decoder.ops.stack(states), _active_rows(parts, packed)
    tapped = [x for _ in taps]
    if len(rows):
        active = [part for part in parts if part.num_active]
        bounds = (0, *np.cumsum([part.num_active for part in active]).tolist())
        past = Past([part.cache.slots(tuple(part.span.parents[: part.first])) for part in active])
        mask = Tree(_pick(packed.parents, rows), bounds)
        x, tapped = decoder.run(x, start, end, _pick(packed.positions, rows), past, mask, taps)
    return _split(x, parts), [_split(array, parts) for array in tapped]


def _split(x: Array, parts: Sequence[_Part]) -> list[Array]:
    ends = np.cumsum([part.num_active for part in parts]).tolist()
    return [x[end - part.num_active : end] for part, end in zip(parts, ends, strict=True)]


def _make_outputs(decoder: Decoder, states: Sequence[Array], parts: Sequence[_Part], notes: bool) -> list[SpanOutput]:
    ops = decoder.ops
    rows = [
        state[[row - part.first for row in part.span.logit_rows]] for part, state in zip(parts, states, strict=True)
    ]
    asked = ops.stack(rows)
    shared = AskedRows.of_states(decoder, asked) if len(asked) else None
    outputs = []
    first = 0
    for part in parts:
        end = first + len(part.span.logit_rows)
        taps = ops.concat([part.taps[tap] for tap in part.span.taps]) if part.span.taps else None
        note = _note(decoder, part) if notes else None
        outputs.append(SpanOutput(shared if end > first else None, first, end, taps, note))
        first = end
    return outputs


def _note(decoder: Decoder, part: _Part) -> Computed:
    """Tell the cache and the caller what the pass has computed."""
    span, early = part.span, part.early
    if len(early) < part.num_rows:
        assert part.done is not None
        early = decoder.ops.stack([part.done.hidden[: part.num_rows - len(early)], early])
    computed = Computed(tuple(span.tokens), tuple(span.parents), decoder.numbers, decoder.num_leading, early)
    part.cache.note(computed)
    return computed
