"""Ops on numpy arrays and the project's own C++ kernels (csrc/): the CPU engine.

Every row's result is the same bits however many rows, sequences or threads work beside it. All arrays are
C-contiguous float32; weights are float32 or unsigned 8-bit in groups of 32, caches float32 or float16.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from sakiyomi.cores import count_cores
from sakiyomi.errors import MissingExtraError, ParameterError, advise_extra
from sakiyomi.ops.base import (
    Blocks,
    BurstDraft,
    BurstRules,
    BurstStep,
    Causal,
    Dense,
    DraftRoom,
    DraftRows,
    FuseWeights,
    GreedyRules,
    HeadEnds,
    KVSlots,
    LanguageHead,
    LayerWeights,
    Mask,
    Matrix,
    MedusaWeights,
    MlpWeights,
    Ops,
    Past,
    Placeholder,
    RowChoice,
    StackSpec,
    Tree,
)
from sakiyomi.tree import Draft
from sakiyomi.types import GROUP_SIZE, Quantized

_native: Any
try:
    _native = import_module("sakiyomi._native")
except ImportError:
    _native = None

Floats: TypeAlias = npt.NDArray[np.float32]

MAX_THREADS = 256
KEY_BLOCK = 32
"""Positions of a cache in 8 bits that lie together."""
LEAST_PAGED = 1 << 20
"""Bytes of a cache from which on it has pages of its own."""
MIN_SCREENED_BYTES = 4 << 20
"""Of heads that have a coarse copy; smaller ones stay in the caches."""
ROPE_BLOCK = 1024
_LARGEST_HALF = 65504.0
_STORAGES = {"8bit": "bytes", "4bit": "nibbles", "spans": "spans"}
_MAX_FORMS = 16
_BURST_ROWS = 256
"""Positions that a burst feeds at most."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight as the kernels read it.

    Attributes:
        storage: "floats", "bytes", "nibbles" or "spans" (csrc/kernels.hpp).
        shape: [N, K].
        data: uint8, at an address that is a multiple of 64; its layout is that of csrc/kernels.hpp.
    """

    storage: str
    shape: tuple[int, int]
    data: npt.NDArray[np.uint8]


class WeightStore(Protocol):
    """Keeps packed weights from one start to the next (models/packed.py)."""

    def find(self, name: str) -> Packed | None:
        """What was kept under a name."""
        ...

    def add(self, name: str, packed: Packed) -> None:
        """Keep a weight under a name."""
        ...


class NativeOps(Ops):
    """The operations in C++ on the CPU.

    Args:
        dtype: "int8" holds quantized matrices as they are, quantizes float ones whose width is a multiple of 32, and
            rounds the inputs of `linear` to 8 bits in groups of 32; caches are float16. "float32" rounds nothing.
        threads: threads that share the work of an operation; None takes one per core (cores.py).
        store: where `named_weight` keeps packed weights, or None.

    Environment:
        SAKIYOMI_ISA: amx, avx512, avx2, neon or portable, instead of the widest that the machine has.
        SAKIYOMI_STORAGE: "8bit" holds four-bit matrices in eight bits, "4bit" with a scale and a min for each group,
            "spans" with its ends where these give the same (csrc/spans.hpp), instead of what is fastest here. The
            results are the same bits.

    Raises:
        MissingExtraError: the package was installed without its C++ kernels.
        ParameterError: a wrong argument, SAKIYOMI_ISA names an instruction set that this machine lacks, or
            SAKIYOMI_STORAGE no storage.
    """

    name = "native"
    is_bit_exact = True
    has_best_ids = True
    has_bursts = True

    def __init__(
        self,
        *,
        dtype: Literal["int8", "float32"] = "int8",
        threads: int | None = None,
        store: WeightStore | None = None,
    ) -> None:
        if _native is None:
            raise MissingExtraError(
                "the native kernels are not built; install a C++17 compiler and reinstall sakiyomi, "
                f"or run {advise_extra('torch')}, and use the torch backend."
            )
        if dtype not in ("int8", "float32"):
            raise ParameterError(f"dtype={dtype!r} is not allowed; give 'int8' or 'float32'.")
        if threads is not None and not (type(threads) is int and 1 <= threads <= MAX_THREADS):
            raise ParameterError(
                f"threads={threads!r} is not allowed; give an integer from 1 to {MAX_THREADS} or None."
            )
        try:
            self.isa: str = _native.isa()
        except ValueError as error:
            raise ParameterError(str(error)) from None
        self.dtype = dtype
        self.threads = min(count_cores(), MAX_THREADS) if threads is None else threads
        self._store = store
        self._small = _small_storage()
        self._rope_tables: dict[tuple[bytes, float], Floats] = {}
        self._stacks, self._mlp_steps, self._medusa_heads = _Forms(), _Forms(), _Forms()

    @property
    def packing(self) -> str:
        """Names how weights are packed, for what keeps them."""
        return f"{self.dtype}-{self._small}" if self.dtype == "int8" else self.dtype

    # ---- arrays and weights

    def array(self, values: npt.NDArray[Any]) -> Floats:
        return _floats(values)

    def weight(self, matrix: Matrix | Sequence[Matrix]) -> Any:
        parts = [matrix] if isinstance(matrix, np.ndarray | Quantized) else list(matrix)
        if not parts or any(len(part.shape) != 2 for part in parts):
            raise ParameterError("a weight is a matrix [N, K], or several over the same input.")
        if self.dtype == "int8" and all(_can_quantize(part) for part in parts):
            return _native.PackedWeight.from_quantized([_fields(quantize(part)) for part in parts], self._small)
        return _native.PackedWeight.from_dense(
            [_floats(part.dequantize() if isinstance(part, Quantized) else part) for part in parts]
        )

    def named_weight(self, name: str, load: Callable[[], Matrix | Sequence[Matrix]]) -> Any:
        kept = None if self._store is None else self._store.find(name)
        if kept is not None:
            return _native.PackedWeight.from_packed(kept.storage, *kept.shape, kept.data)
        weight = self.weight(load())
        if self._store is not None:
            self._store.add(name, Packed(weight.storage, weight.shape, weight.packed))
        return weight

    def prepare_head(self, name: str, head: Any, norm: Floats) -> None:
        if head.num_bytes < MIN_SCREENED_BYTES:
            return
        kept = None if self._store is None else self._store.find(name)
        screen = _native.make_screen(head, norm, self.threads) if kept is None else kept.data
        if screen is None:
            return
        _native.set_screen(head, screen)
        if kept is None and self._store is not None:
            self._store.add(name, Packed("bytes", head.shape, screen))

    def to_numpy(self, x: Floats) -> Floats:
        return x

    def new_kv(
        self, num_layers: int, num_kv_heads: int, head_dim: int, capacity: int
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        if self.dtype == "float32":
            shape = (num_layers, num_kv_heads, capacity, head_dim)
            return _new_pair(shape, shape, np.float32)
        blocks = (num_layers, num_kv_heads, -(-capacity // KEY_BLOCK))
        sizes = _native.key_block_bytes(head_dim), _native.value_block_bytes(head_dim)
        return _new_pair((*blocks, sizes[0]), (*blocks, sizes[1]), np.uint8)

    def copy_slots(self, source: tuple[Any, Any], target: tuple[Any, Any], count: int) -> None:
        is_blocks = self.dtype == "int8"
        super().copy_slots(source, target, -(-count // KEY_BLOCK) if is_blocks else count)

    def move_slots(self, kv: tuple[Any, Any], head_dim: int, source: Sequence[int], target: Sequence[int]) -> None:
        if self.dtype == "float32":
            super().move_slots(kv, head_dim, source, target)
        else:
            _native.move_slots(*kv, head_dim, list(source), list(target))

    # ---- operations

    def embed(self, table: Any, ids: npt.NDArray[np.int32]) -> Floats:
        ids = _ints(ids)
        out = np.empty((len(ids), table.shape[1]), np.float32)
        _native.embed(table, ids, out)
        return out

    def select_rows(self, weight: Any, ids: npt.NDArray[np.int32]) -> Any:
        return _native.select_rows(weight, _ints(ids))

    def linear(self, x: Floats, weight: Any, bias: Floats | None = None) -> Floats:
        out = np.empty((len(x), weight.shape[0]), np.float32)
        _native.linear(_floats(x), weight, bias, out, self.threads)
        return out

    def logits(self, x: Floats, head: Any) -> Floats:
        """Inputs of a quantized head keep 16 bits, which costs little where memory is the limit."""
        out = np.empty((len(x), head.shape[0]), np.float32)
        _native.linear(_floats(x), head, None, out, self.threads, True)
        return out

    def normed_logits(self, x: Floats, norm: Floats, eps: float, head: Any) -> Floats:
        out = np.empty((len(x), head.shape[0]), np.float32)
        _native.linear(_floats(x), head, None, out, self.threads, True, norm, eps)
        return out

    def best_ids(self, x: Floats, norm: Floats, eps: float, head: Any) -> npt.NDArray[np.int64]:
        """The first term of the inputs over the whole head, both where the largest logit may be (csrc/head.cpp)."""
        ids = np.empty(len(x), np.int64)
        _native.best_ids(_floats(x), head, norm, eps, ids, self.threads)
        return ids

    def chosen_ids(
        self, x: Floats, norm: Floats, eps: float, head: Any, choices: Sequence[RowChoice]
    ) -> npt.NDArray[np.int64]:
        """As `best_ids`, and noise where it may decide."""
        ids = np.empty(len(x), np.int64)
        _native.chosen_ids(_floats(x), head, norm, eps, choices, ids, self.threads)
        return ids

    def rms_norm(self, x: Floats, weight: Floats, eps: float) -> Floats:
        rows = _floats(x)
        out = np.empty(x.shape, np.float32)
        if x.ndim == 2:
            _native.rms_norm(rows, weight, eps, out, self.threads)
        else:
            _native.rms_norm(rows.reshape(-1, x.shape[-1]), weight, eps, out.reshape(-1, x.shape[-1]), self.threads)
        return out

    def rope(
        self, x: Floats, positions: npt.NDArray[np.int32], inv_freq: npt.NDArray[np.float32], scale: float = 1.0
    ) -> Floats:
        positions = _ints(positions)
        x = _floats(x)
        out = np.empty_like(x)
        _native.rope(
            x, positions, self._rope_table(_count_positions(positions.tolist()), inv_freq, scale), out, self.threads
        )
        return out

    def store(self, past: Past, k: Floats, v: Floats, bounds: Sequence[int]) -> tuple[Floats, Floats]:
        k, v = _floats(k), _floats(v)
        stored_k, stored_v = np.empty_like(k), np.empty_like(v)
        _native.store(k, v, *_caches(past), past.layer, list(bounds), stored_k, stored_v)
        return stored_k, stored_v

    def attend(
        self, q: Floats, k: Floats, v: Floats, past: Past | None, mask: Mask, window: int | None = None
    ) -> Floats:
        q = _floats(q)
        num_rows, num_heads, width = q.shape
        out = np.empty((num_rows, num_heads * width), np.float32)
        scale = float(width) ** -0.5
        if past is None:
            offsets, columns = _visible_rows(mask, num_rows)
            _native.attend_rows(q, _floats(k), _floats(v), offsets, columns, _window(window), scale, out, self.threads)
            return out
        bounds, parents = _segments(mask)
        _native.attend_cache(
            q, k.shape[1], *_caches(past), past.layer, bounds, parents, _window(window), scale, out, self.threads
        )
        return out

    def silu_mul(self, gate_up: Floats) -> Floats:
        rows = _floats(gate_up).reshape(-1, gate_up.shape[-1])
        out = np.empty((len(rows), rows.shape[1] // 2), np.float32)
        _native.silu_mul(rows, out, self.threads)
        return out.reshape(*gate_up.shape[:-1], out.shape[-1])

    def add(self, x: Floats, y: Floats) -> Floats:
        if x.shape != y.shape:
            raise ParameterError(f"cannot add {x.shape} and {y.shape}; give two arrays of one shape.")
        out = np.empty(x.shape, np.float32)
        _native.add(_floats(x).reshape(-1), _floats(y).reshape(-1), out.reshape(-1), self.threads)
        return out

    def argmax(self, x: Floats) -> npt.NDArray[np.int64]:
        out = np.empty(len(x), np.int64)
        _native.argmax(_floats(x), out, self.threads)
        return out

    # ---- a step of an MLP speculator, fused

    def mlp_step(
        self, left: Floats, token_ids: npt.NDArray[np.int32], embedding: Any, weights: MlpWeights, head: Any
    ) -> tuple[Floats, Floats]:
        if weights.down.shape[1] % GROUP_SIZE:
            return super().mlp_step(left, token_ids, embedding, weights, head)
        num_rows = len(token_ids)
        states = np.empty((num_rows, weights.down.shape[0]), np.float32)
        logits = np.empty((num_rows, head.shape[0]), np.float32)
        step = self._mlp_step(embedding, weights, head)
        step.run(_floats(left), _ints(token_ids), states, logits, self.threads)
        return states, logits

    def mlp_drafts(
        self, embedding: Any, steps: tuple[MlpWeights, MlpWeights], head: Any, rules: GreedyRules
    ) -> DraftRows:
        if steps[0].down.shape[1] % GROUP_SIZE:
            return super().mlp_drafts(embedding, steps, head, rules)
        start, advance = (self._mlp_step(embedding, weights, head) for weights in steps)
        fields = (rules.ids, rules.sharpness, rules.width, rules.lowest, self.threads)
        drafts: DraftRows = _native.MlpDrafts(start, advance, *fields)
        return drafts

    def _mlp_step(self, embedding: Any, weights: MlpWeights, head: Any) -> Any:
        """The C++ form of a step, kept for the next call with the same weights."""
        return self._mlp_steps.of(self._make_mlp_step, embedding, weights, head)

    def _make_mlp_step(self, embedding: Any, weights: MlpWeights, head: Any) -> Any:
        fields = (weights.fuse, weights.fuse_token, weights.bias, weights.inner_norm, weights.gate_up, weights.down)
        sums = self._token_sums(embedding, weights)
        return _native.MlpStep(
            (*fields, weights.norm, weights.ones), embedding, head, sums, weights.token_rows, weights.eps
        )

    def _token_sums(self, embedding: Any, weights: MlpWeights) -> Floats | None:
        """What those tokens add to a step that have vectors of their own, float32 [M, H]: looked up, not computed."""
        if weights.tokens is None or weights.token_rows is None:
            return None
        num_rows = weights.tokens.shape[0] - 1
        ids = np.flatnonzero(weights.token_rows < num_rows)
        ids = ids[np.argsort(weights.token_rows[ids])]
        normed = self.rms_norm(self.embed(embedding, _ints(ids)), weights.ones, weights.eps)
        own = self.embed(weights.tokens, np.arange(num_rows, dtype=np.int32))
        return self.add(own, self.linear(normed, weights.fuse_token))

    # ---- a decoder stack, fused

    def decoder_stack(
        self,
        x: Floats,
        layers: Sequence[LayerWeights],
        spec: StackSpec,
        positions: npt.NDArray[np.int32],
        past: Past | None,
        mask: Mask,
        taps: Sequence[int] = (),
        read: Floats | None = None,
    ) -> tuple[Floats, list[Floats]]:
        if past is None or not layers:
            return super().decoder_stack(x, layers, spec, positions, past, mask, taps, read)
        x, positions = _floats(x), _ints(positions)
        bounds, parents = _segments(mask)
        table = self._rope_table(_count_positions(positions.tolist()), spec.inv_freq, spec.rope_scale)
        out, tapped = np.empty_like(x), [np.empty_like(x) for _ in taps]
        self._stack(layers, spec).run(
            *(x, positions, table, *_caches(past), past.layer, bounds, parents, list(taps), tapped, out, self.threads),
            None if read is None else _floats(read),
        )
        return out, tapped

    def decoder_pass(
        self,
        token_ids: Sequence[int],
        embedding: Any,
        layers: Sequence[LayerWeights],
        spec: StackSpec,
        positions: Sequence[int],
        past: Past | None,
        mask: Mask,
        rows: Sequence[int],
        taps: Sequence[int] = (),
        head: LanguageHead | None = None,
        choices: Sequence[RowChoice] = (),
    ) -> tuple[Floats | None, Floats | None, npt.NDArray[np.int64] | None]:
        """One call for all of it: with a small model what Python does between two calls is a share of a step."""
        if past is None or not layers or not isinstance(mask, Causal | Tree):
            return super().decoder_pass(
                token_ids, embedding, layers, spec, positions, past, mask, rows, taps, head, choices
            )
        width, count = embedding.shape[1], len(rows)
        table = self._rope_table(_count_positions(positions), spec.inv_freq, spec.rope_scale)
        states = np.empty((count, width), np.float32)
        tapped = np.empty((len(token_ids), len(taps) * width), np.float32) if taps else None
        chosen = None if head is None or not count else np.empty(count, np.int64)
        norm, eps, weight = head or (None, 0.0, None)
        parents = mask.parents if isinstance(mask, Tree) else None
        self._stack(layers, spec).run_tokens(
            *(embedding, token_ids, positions, table, *_caches(past), past.layer, mask.bounds, parents),
            *(taps, tapped, rows, states, weight, norm, eps, choices, chosen, self.threads),
        )
        return (states if count else None), tapped, chosen

    def run_burst(
        self,
        last: int,
        embedding: Any,
        layers: Sequence[LayerWeights],
        spec: StackSpec,
        slots: KVSlots,
        capacity: int,
        taps: Sequence[int],
        first_taps: Floats | None,
        head: LanguageHead,
        rules: BurstRules,
    ) -> tuple[list[BurstStep], Floats]:
        kept = np.empty((_BURST_ROWS, len(taps) * embedding.shape[1]), np.float32)
        found = self._stack(layers, spec).run_burst(
            *(embedding, last, self._rope_table(capacity, spec.inv_freq, spec.rope_scale)),
            *([slots.keys], [slots.values], slots.length, capacity, 0, list(taps), first_taps, kept, rules),
            *(head.weight, head.norm, head.eps, self.threads),
        )
        steps = [BurstStep._make((*numbers, list(map(BurstDraft._make, drafts)))) for *numbers, drafts in found]
        return steps, kept[: sum(len(step.tokens) for step in steps)]

    def _stack(self, layers: Sequence[LayerWeights], spec: StackSpec) -> Any:
        """The C++ form of the layers, kept for the next call with the same objects (never changed in place)."""
        return self._stacks.of(_make_stack, spec, layers)

    # ---- a pass of an EAGLE head, fused

    def head_pass(
        self,
        features: Floats,
        token_ids: npt.NDArray[np.int32],
        ends: HeadEnds,
        layers: Sequence[LayerWeights],
        spec: StackSpec,
        positions: npt.NDArray[np.int32],
        past: Past | None,
        mask: Mask,
        with_logits: bool,
    ) -> tuple[Floats, Floats, Floats | None]:
        if past is None:
            return super().head_pass(features, token_ids, ends, layers, spec, positions, past, mask, with_logits)
        features, positions = _floats(features), _ints(positions)
        bounds, parents = _segments(mask)
        normed, states = np.empty_like(features), np.empty_like(features)
        logits = np.empty((len(features), ends.head.shape[0]), np.float32) if with_logits else None
        table = self._rope_table(_count_positions(positions.tolist()), spec.inv_freq, spec.rope_scale)
        self._stack(layers, spec).run_head(
            *(
                features,
                _ints(token_ids),
                _end_fields(ends),
                positions,
                table,
                *_caches(past),
                past.layer,
                bounds,
                parents,
            ),
            *(normed, states, logits, self.threads),
        )
        return normed, states, logits

    def head_drafts(
        self,
        taps: Floats,
        fuse: FuseWeights,
        token_ids: npt.NDArray[np.int32],
        ends: HeadEnds,
        layers: Sequence[LayerWeights],
        spec: StackSpec,
        past: Past,
        mask: Causal,
        feeds_normed: bool,
        rules: GreedyRules,
        rooms: Sequence[DraftRoom],
        placeholder: Placeholder | None = None,
    ) -> tuple[list[Draft | None], Floats, Floats] | None:
        stack = self._stack(layers, spec)
        keys, values, lengths, _ = _caches(past)
        states = np.empty((len(lengths), ends.embedding.shape[1]), np.float32)
        logits = np.empty((len(lengths), ends.head.shape[0]), np.float32)
        num_positions = max(lengths) + len(taps) + max(room.max_depth for room in rooms)
        table = self._rope_table(num_positions, spec.inv_freq, spec.rope_scale)
        caches = keys, values, lengths, past.layer, list(mask.bounds)
        fused = _floats(taps), (fuse.norms, fuse.matrix)
        rows = *fused, _ints(token_ids), _end_fields(ends), table, *caches, feeds_normed
        last = list(rooms), states, logits, self.threads
        if placeholder is None:
            found = stack.draft_chains(*rows, rules.ids, rules.sharpness, rules.lowest, *last)
        else:
            ahead = placeholder.feature[0], placeholder.token_id, rules.ids, rules.sharpness, rules.width, rules.lowest
            found = stack.draft_places(*rows, *ahead, *last)
        return found, logits, states

    # ---- Medusa heads, fused

    def medusa_drafts(
        self, states: Floats, weights: MedusaWeights, rules: GreedyRules, rooms: Sequence[DraftRoom]
    ) -> list[Draft | None]:
        heads = self._medusa_heads.of(_make_medusa_heads, weights)
        numbers = rules.sharpness, rules.width, rules.lowest
        drafts: list[Draft | None] = heads.draft(_floats(states), rules.ids, *numbers, list(rooms), self.threads)
        return drafts

    # ---- helpers

    def _rope_table(self, needed: int, inv_freq: npt.NDArray[np.float32], scale: float) -> Floats:
        """Cosines and sines [P, D] that cover `needed` positions, grown in whole blocks."""
        key = (inv_freq.tobytes(), float(scale))
        table = self._rope_tables.get(key)
        if table is None or len(table) < needed:
            first = 0 if table is None else len(table) // ROPE_BLOCK
            blocks = [_rope_block(i, inv_freq, scale) for i in range(first, -(-needed // ROPE_BLOCK))]
            table = np.concatenate(blocks if table is None else [table, *blocks])
            self._rope_tables[key] = table
        return table


def checksum(data: npt.NDArray[np.uint8]) -> int:
    """A 64-bit number of the bytes [N] that damage changes; it is read at the speed of memory."""
    number: int = _native.checksum(data)
    return number


def list_isas() -> list[str]:
    """The instruction sets that SAKIYOMI_ISA may name on this machine, narrowest first."""
    return str(_native.isas()).split()


def _new_pair(
    keys: tuple[int, ...], values: tuple[int, ...], dtype: npt.DTypeLike
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Room for keys and values of such shapes, large ones in huge pages.

    A pass touches each layer's part once, so that addresses in small pages would take long to translate. All of a huge
    page is resident once any of it is written, up to 2 MB beyond what is asked for.
    """
    size = np.dtype(dtype).itemsize
    num_key_bytes, num_bytes = math.prod(keys) * size, (math.prod(keys) + math.prod(values)) * size
    if num_bytes < LEAST_PAGED:
        return np.empty(keys, dtype), np.empty(values, dtype)
    room = _native.new_bytes(num_bytes)
    return room[:num_key_bytes].view(dtype).reshape(keys), room[num_key_bytes:].view(dtype).reshape(values)


def quantize(matrix: Matrix, bits: int = 8) -> Quantized:
    """An [N, K] matrix in unsigned 8-bit values, scale and min per group of 32; quantized ones stay as they are.

    Min is rounded down and scale up, so that every value of the group lies inside the range.

    Args:
        bits: 8, or 4 for values up to 15, which `Ops.weight` holds in half the room.
    """
    if isinstance(matrix, Quantized):
        return matrix
    highest_value = 2**bits - 1
    groups = _floats(matrix).reshape(matrix.shape[0], -1, GROUP_SIZE)
    lowest, highest = groups.min(axis=2), groups.max(axis=2)
    mins = _round_half(lowest, -np.inf)
    low = mins.astype(np.float32)
    scales = _round_half((highest - low) / np.float32(highest_value), np.inf)
    steps = scales.astype(np.float32)
    inverse = np.divide(np.float32(1.0), steps, out=np.zeros_like(steps), where=steps > 0)
    values = np.rint((groups - low[:, :, None]) * inverse[:, :, None])
    return Quantized(np.clip(values, 0, highest_value).astype(np.uint8).reshape(matrix.shape), scales, mins)


def _round_half(values: Floats, towards: float) -> npt.NDArray[np.float16]:
    nearest = values.astype(np.float16)
    overshoot = nearest.astype(np.float32) - values
    is_wrong = overshoot > 0 if towards < 0 else overshoot < 0
    return np.where(is_wrong, np.nextafter(nearest, np.float16(towards)), nearest)


def _small_storage() -> str:
    """How matrices whose values fit four bits are held (csrc/kernels.hpp)."""
    named = os.environ.get("SAKIYOMI_STORAGE", "")
    if not named:
        return "spans" if _native.prefers_spans() else "nibbles"
    if named not in _STORAGES:
        raise ParameterError(f"SAKIYOMI_STORAGE={named!r} is not allowed; give {', '.join(_STORAGES)} or nothing.")
    return _STORAGES[named]


def _can_quantize(matrix: Matrix) -> bool:
    if isinstance(matrix, Quantized):
        return True
    return matrix.shape[1] % GROUP_SIZE == 0 and bool(np.abs(matrix).max(initial=0.0) <= _LARGEST_HALF / 2)


def _fields(matrix: Quantized) -> tuple[npt.NDArray[Any], ...]:
    return tuple(np.ascontiguousarray(field) for field in (matrix.values, matrix.scales, matrix.mins))


def _floats(x: npt.NDArray[Any]) -> Floats:
    return np.ascontiguousarray(x, np.float32)


def _ints(x: npt.NDArray[Any] | Sequence[int]) -> npt.NDArray[np.int32]:
    return np.ascontiguousarray(x, np.int32)


def _layer_fields(layer: LayerWeights, window: int | None) -> tuple[Any, ...]:
    return (
        layer.input_norm,
        layer.qkv,
        layer.qkv_bias,
        layer.q_norm,
        layer.k_norm,
        layer.output,
        layer.output_bias,
        layer.post_norm,
        layer.gate_up,
        layer.down,
        _window(window),
    )


def _count_positions(positions: Sequence[int]) -> int:
    return max(max(positions, default=0), 0) + 1


def _end_fields(ends: HeadEnds) -> tuple[Any, ...]:
    return (
        ends.embedding,
        ends.embed_norm,
        ends.feature_norm,
        ends.norm_before_residual,
        ends.final_norm,
        ends.head,
    )


class _Forms:
    """C++ forms of Python objects, kept for the next call with the very same ones."""

    def __init__(self) -> None:
        self._entries: dict[tuple[int, ...], tuple[Any, tuple[object, ...]]] = {}

    def of(self, make: Callable[..., Any], *objects: object) -> Any:
        """What `make` made of the objects, which live as long as their form: no others can get their identities."""
        key = tuple(map(id, objects))
        entry = self._entries.get(key)
        if entry is None:
            if len(self._entries) >= _MAX_FORMS:
                self._entries.clear()
            entry = self._entries[key] = make(*objects), objects
        return entry[0]


def _make_stack(spec: StackSpec, layers: Sequence[LayerWeights]) -> Any:
    fields = [_layer_fields(layer, spec.window(i)) for i, layer in enumerate(layers)]
    return _native.DecoderStack(fields, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.eps)


def _make_medusa_heads(weights: MedusaWeights) -> Any:
    blocks = [list(layer) for layer in weights.blocks]
    return _native.MedusaHeads(blocks, list(weights.heads), weights.norm, weights.ones, weights.eps)


def _window(window: int | None) -> int:
    if window is not None and window < 1:
        raise ParameterError(f"window={window} is not allowed; give at least 1, or None.")
    return window or 0


def _caches(past: Past) -> tuple[list[Any], list[Any], list[int], list[tuple[int, ...]]]:
    slots = past.slots
    return [s.keys for s in slots], [s.values for s in slots], [s.length for s in slots], [s.pending for s in slots]


def _segments(mask: Mask) -> tuple[list[int], npt.NDArray[np.int32] | None]:
    if isinstance(mask, Tree):
        return list(mask.bounds), _ints(mask.parents)
    if isinstance(mask, Causal):
        return list(mask.bounds), None
    raise ParameterError(f"{type(mask).__name__} masks take no past; use Causal or Tree.")


def _visible_rows(mask: Mask, num_rows: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """For each row the rows it attends to, in order: offsets [R + 1] into the columns."""
    visible = [_ints(np.asarray(rows)) for rows in _rows_of(mask, num_rows)]
    offsets = np.zeros(num_rows + 1, np.int64)
    np.cumsum([len(rows) for rows in visible], out=offsets[1:])
    return offsets, np.concatenate(visible) if visible else np.zeros(0, np.int32)


def _rows_of(mask: Mask, num_rows: int) -> list[Any]:
    if isinstance(mask, Dense):
        return [np.flatnonzero(row) for row in mask.allowed]
    if isinstance(mask, Blocks):
        return [np.flatnonzero(mask.doc_ids[: row + 1] == mask.doc_ids[row]) for row in range(num_rows)]
    rows: list[Any] = []
    for start, stop in zip(mask.bounds, mask.bounds[1:], strict=False):
        if isinstance(mask, Causal):
            rows += [np.arange(start, row + 1) for row in range(start, stop)]
            continue
        for row in range(start, stop):
            parent = int(mask.parents[row])
            above = rows[start + parent] if parent >= 0 else np.zeros(0, np.int32)
            rows.append(np.append(above, row))
    return rows


def _rope_block(index: int, inv_freq: npt.NDArray[np.float32], scale: float) -> Floats:
    """Cosines and sines of one block of positions, always computed in the same shape so that none depends on growth."""
    positions = np.arange(index * ROPE_BLOCK, (index + 1) * ROPE_BLOCK, dtype=np.float32)
    angles = (positions[:, None] * inv_freq.astype(np.float32)[None, :]).astype(np.float64)
    factor = np.float32(scale)
    return np.concatenate([np.cos(angles).astype(np.float32) * factor, np.sin(angles).astype(np.float32) * factor], 1)
