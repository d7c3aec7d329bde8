"""Models whose attention takes a mask of ours: the trees of several sequences in one pass, any rows kept.

Rows of all sequences stand behind one another in a batch of one. Each sequence has keys and values of its own, which
the layers see side by side; a 4-D mask says which row sees which. Windows and chunks count positions, not places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer, DynamicCache, DynamicLayer
from transformers.cache_utils import DynamicSlidingWindowLayer as WindowLayer

from sakiyomi.errors import ParameterError
from sakiyomi.models.hf.calls import Caller
from sakiyomi.models.packing import AskedRows, PackedSpans, pack_spans, split_result
from sakiyomi.ops.torch import TorchOps
from sakiyomi.types import DraftShape, ModelInfo, Output, Span

FIRST_CAPACITY = 64
MAX_COLUMNS = 4096
"""Keys of one pass over several sequences."""
FOREIGN_CACHE = "a span holds a cache of another model; take caches from this model's new_cache()."
FULL, WINDOWED, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


class TreeRunner:
    """Runs spans over caches of ours.

    Raises:
        ParameterError: a model with layers that are no plain attention over all, the last, or a chunk of positions.
    """

    draft_shape: DraftShape = "trees"

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._kinds = read_kinds(caller.config)
        self._ops = TorchOps(caller.dtype, caller.device)

    def new_cache(self, info: ModelInfo) -> TreeCache:
        return TreeCache(len(self._kinds), info.max_model_len)

    def forward(self, spans: Sequence[Span], info: ModelInfo) -> list[Output]:
        check_distinct(spans)
        caches = [_own_cache(span, len(self._kinds)) for span in spans]
        packs = [(group, pack_spans(group, info)) for group in group_spans(spans)]
        try:
            return [output for group, packed in packs for output in self._run(group, packed, info)]
        except BaseException:
            # Rows of a pass that broke off must never be committed.
            for cache in caches:
                cache.keep(())
            raise

    def _run(self, spans: Sequence[Span], packed: PackedSpans, info: ModelInfo) -> Sequence[Output]:
        caches = [_own_cache(span, len(self._kinds)) for span in spans]
        for cache, span in zip(caches, spans, strict=True):
            cache.reserve(len(span.tokens))
        layers: list[Any] = [
            DummyLayer() if kind is None else _PackedLayer(caches, index, packed.bounds, kind)
            for index, kind in enumerate(self._kinds)
        ]
        logits, taps, _ = self._caller(
            list(packed.token_ids),
            Cache(layers=layers),
            packed.logit_rows,
            packed.taps,
            mask=self._mask(caches, packed),
            positions=list(packed.positions),
        )
        if any(not layer.is_written for layer in layers if isinstance(layer, _PackedLayer)):
            raise ParameterError("this model leaves out layers of its cache, which cannot be kept then.")
        rows = None if logits is None else AskedRows.of_logits(self._ops, logits[:, : info.vocab_size])
        return split_result(self._ops, spans, packed, rows, taps)

    def _mask(self, caches: Sequence[TreeCache], packed: PackedSpans) -> Any:
        masks = {
            kind.name: self._additive(allowed_pattern(packed, [cache.length for cache in caches], kind))
            for kind in dict.fromkeys(filter(None, self._kinds))
        }
        return masks if hasattr(self._caller.config, "layer_types") and len(masks) > 1 else next(iter(masks.values()))

    def _additive(self, allowed: npt.NDArray[np.bool_]) -> Tensor:
        mask = torch.zeros(allowed.shape, dtype=self._caller.dtype, device=self._caller.device)
        mask.masked_fill_(~torch.from_numpy(allowed).to(mask.device), torch.finfo(mask.dtype).min)
        return mask[None, None]


def group_spans(spans: Sequence[Span]) -> list[list[Span]]:
    """Spans that run in one pass, in order.

    A row computes what it has to do with the keys of its neighbours too, before the mask leaves them out. For many
    long texts that would cost more than reading the weights once saves.
    """
    groups: list[list[Span]] = []
    num_columns = 0
    for span in spans:
        own = span.cache.length + len(span.tokens)
        num_columns += own
        if not groups or num_columns > MAX_COLUMNS:
            groups.append([])
            num_columns = own
        groups[-1].append(span)
    return groups


# ---------------------------------------------------------------------------------------------- what a row sees


@dataclass(frozen=True, slots=True)
class Kind:
    """What the rows of a layer see.

    Attributes:
        name: as transformers calls it.
        size: positions of a window (the row's own included) or of a chunk; None where a row sees all.
    """

    name: str
    size: int | None = None

    def first_seen(self, position: int) -> int:
        """The first position that a row at `position` sees."""
        if self.size is None:
            return 0
        if self.name == CHUNKED:
            return position // self.size * self.size
        return max(position - self.size + 1, 0)


def read_kinds(config: Any) -> list[Kind | None]:
    """For each layer what its rows see; None for a layer without keys of its own.

    Raises:
        ParameterError: a layer of another kind, two sizes of one kind, or two kinds without names.
    """
    layers = DynamicCache(config=config).layers
    names = getattr(config, "layer_types", None) or [None] * len(layers)
    kinds = [_read_kind(layer, name) for layer, name in zip(layers, names, strict=True)]
    sizes: Mapping[str, set[int | None]] = {kind.name: set() for kind in kinds if kind is not None}
    for kind in filter(None, kinds):
        sizes[kind.name].add(kind.size)
    if not sizes or any(len(found) > 1 for found in sizes.values()) or (names[0] is None and len(sizes) > 1):
        raise ParameterError("this model's layers see in different ways that have no names to give masks by.")
    return kinds


def _read_kind(layer: Any, name: str | None) -> Kind | None:
    if type(layer) is DummyLayer:
        return None
    if type(layer) is DynamicLayer and name in (None, FULL):
        return Kind(FULL)
    if type(layer) is WindowLayer and name in (None, WINDOWED, CHUNKED):
        return Kind(name or WINDOWED, layer.sliding_window)
    raise ParameterError(f"a layer of the kind {name or type(layer).__name__} takes no mask of ours.")


def allowed_pattern(packed: PackedSpans, lengths: Sequence[int], kind: Kind) -> npt.NDArray[np.bool_]:
    """Which columns each row sees, bool [R, C]: what is cached of each sequence from `first_seen` on, then the rows."""
    num_rows = len(packed.positions)
    first_seen = np.array([kind.first_seen(position) for position in packed.positions])
    own = np.zeros((num_rows, num_rows), np.bool_)
    parts = []
    for length, start, stop in zip(lengths, packed.bounds, packed.bounds[1:], strict=False):
        columns = np.arange(kind.first_seen(length), length)
        cached = np.zeros((num_rows, len(columns)), np.bool_)
        cached[start:stop] = columns >= first_seen[start:stop, None]
        parts.append(cached)
        for row in range(start, stop):
            parent = packed.parents[row]
            if parent >= 0:
                own[row] = own[start + parent]
            own[row, row] = True
    return np.concatenate([*parts, own & (np.array(packed.positions) >= first_seen[:, None])], axis=1)


# ---------------------------------------------------------------------------------------------- keys and values


class TreeCache:
    """Keys and values of one sequence (`types.Cache`), each layer's in the shapes that its model gives them."""

    def __init__(self, num_layers: int, max_length: int) -> None:
        self.length = 0
        self.num_pending = 0
        self._max_length = max_length
        self._expected = 0
        self._layers: list[list[Tensor]] = [[] for _ in range(num_layers)]

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def num_bytes(self) -> int:
        """Bytes held, spare room included."""
        return sum(slots.nbytes for layer in self._layers for slots in layer)

    def reserve(self, num_rows: int) -> None:
        """Announce the rows of a forward pass; those of an earlier one are dropped."""
        self.num_pending = num_rows

    def write(self, layer: int, new: Sequence[Tensor]) -> None:
        """Put a layer's keys and values [1, G, M, D] behind `length`."""
        end = self.length + self.num_pending
        if not self._layers[layer]:
            self._layers[layer] = [part.new_empty((1, part.shape[1], 0, part.shape[3])) for part in new]
        for index, part in enumerate(new):
            slots = self._layers[layer][index]
            if slots.shape[2] < end:
                capacity = max(end, min(max(2 * slots.shape[2], FIRST_CAPACITY, self._expected), self._max_length))
                grown = part.new_empty((1, part.shape[1], capacity, part.shape[3]))
                grown[:, :, : self.length] = slots[:, :, : self.length]
                self._layers[layer][index] = slots = grown
            slots[:, :, self.length : end] = part

    def read(self, layer: int, first: int, *, pending: bool) -> list[Tensor]:
        """A layer's keys and values from position `first` on, with or without the rows of the pass under way."""
        end = self.length + (self.num_pending if pending else 0)
        return [slots[:, :, first:end] for slots in self._layers[layer]]

    def expect(self, length: int) -> None:
        """When next there is too little room, make some for so many positions."""
        self._expected = length

    def keep(self, path: Sequence[int]) -> None:
        """Commit rows of the last forward pass and drop its other rows.

        Raises:
            ParameterError: a row that the pass did not have, or indices that do not ascend; nothing is changed.
        """
        check_path(path, self.num_pending)
        if any(row != index for index, row in enumerate(path)):
            source = torch.tensor([self.length + row for row in path])
            for layer in self._layers:
                for slots in layer:
                    slots[:, :, self.length : self.length + len(path)] = slots[:, :, source.to(slots.device)]
        self.length += len(path)
        self.num_pending = 0

    def truncate(self, length: int) -> None:
        """Forget every position from `length` on, and pending rows."""
        check_length(length, self.length)
        self.length = length
        self.num_pending = 0

    def fork(self) -> TreeCache:
        """An independent copy of the committed positions."""
        copy = TreeCache(self.num_layers, self._max_length)
        copy.length = self.length
        copy._layers = [[slots[:, :, : self.length].clone() for slots in layer] for layer in self._layers]
        return copy


def check_distinct(spans: Sequence[Span]) -> None:
    """Refuse one cache in two spans."""
    if len({id(span.cache) for span in spans}) < len(spans):
        raise ParameterError("two spans of one forward pass share a cache; give each sequence its own.")


def check_path(path: Sequence[int], num_pending: int) -> None:
    """Refuse rows to keep that the last pass did not have, or that do not ascend."""
    previous = -1
    for row in path:
        if not previous < row < num_pending:
            raise ParameterError(
                f"row {row} cannot be kept after row {previous}: the last forward pass had {num_pending} rows, and "
                "rows to keep ascend."
            )
        previous = row


def check_length(length: int, present: int) -> None:
    """Refuse a length to truncate to that is not below the present one."""
    if not 0 <= length <= present:
        raise ParameterError(f"cannot truncate a cache of {present} positions to {length}.")


def _own_cache(span: Span, num_layers: int) -> TreeCache:
    cache = span.cache
    if not isinstance(cache, TreeCache) or cache.num_layers != num_layers:
        raise ParameterError(FOREIGN_CACHE)
    return cache


class _PackedLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers has no types
    """One layer of several sequences, for one forward pass: their keys side by side, then those of the rows."""

    is_sliding = False

    def __init__(self, caches: Sequence[TreeCache], layer: int, bounds: Sequence[int], kind: Kind) -> None:
        super().__init__()
        self._caches = caches
        self._layer = layer
        self._bounds = bounds
        self._kind = kind
        self.is_written = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if key_states.shape[2] != self._bounds[-1] or self.is_written:
            raise ParameterError("this model writes other rows into its cache than it is given.")
        new = (key_states, value_states)
        for cache, start, stop in zip(self._caches, self._bounds, self._bounds[1:], strict=False):
            cache.write(self._layer, [part[:, :, start:stop] for part in new])
        self.is_written = True
        if len(self._caches) == 1:
            (cache,) = self._caches
            keys, values = cache.read(self._layer, self._kind.first_seen(cache.length), pending=True)
            return keys, values
        past = [cache.read(self._layer, self._kind.first_seen(cache.length), pending=False) for cache in self._caches]
        keys, values = (torch.cat([*parts, new[i]], dim=2) for i, parts in enumerate(zip(*past, strict=True)))
        return keys, values

    def get_seq_length(self) -> int:
        return sum(cache.length for cache in self._caches)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1
