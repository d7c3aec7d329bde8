"""Ops on torch: CPU or GPU, any floating dtype, with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from sakiyomi.errors import ParameterError
from sakiyomi.ops.base import Blocks, Causal, Dense, Mask, Ops, Past, Tree
from sakiyomi.types import Quantized


@dataclass(frozen=True)
class _Angles:
    """Cosines and sines of the last call; the layers of a stack ask for the same ones."""

    positions: npt.NDArray[np.int32]
    inv_freq: npt.NDArray[np.float32]
    scale: float
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class _Patterns:
    """Attention patterns of the last mask, by window; the layers of a stack ask for the same ones."""

    mask: Mask
    pasts: tuple[tuple[int, tuple[int, ...]], ...]
    by_window: dict[int | None, list[Tensor | None]] = field(default_factory=dict)


class TorchOps(Ops):
    """Operations on torch tensors.

    Args:
        dtype: precision of weights, activations and caches.
        device: where they live.

    Raises:
        ParameterError: a device that torch does not have here.
    """

    name = "torch"

    def __init__(self, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> None:
        self.dtype = dtype
        try:
            self.device = torch.device(device)
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise ParameterError(f"device={str(device)!r} is not usable here ({reason}); try 'cpu'.") from None
        self._angles: _Angles | None = None
        self._patterns: _Patterns | None = None

    # ---- arrays and weights

    def array(self, values: npt.NDArray[Any]) -> Tensor:
        """A copy of the values in the working precision."""
        return torch.tensor(values, dtype=self.dtype, device=self.device)

    def weight(self, matrix: npt.NDArray[Any] | Quantized | Sequence[npt.NDArray[Any] | Quantized]) -> Tensor:
        """The matrix (or several, stacked) as one tensor [N, K]; quantised values are expanded."""
        if isinstance(matrix, np.ndarray | Quantized):
            return self.array(matrix.dequantize() if isinstance(matrix, Quantized) else matrix)
        return torch.cat([self.weight(part) for part in matrix])

    def to_numpy(self, x: Tensor) -> npt.NDArray[np.float32]:
        """A float32 copy on the host."""
        return cast("npt.NDArray[np.float32]", x.detach().to("cpu", torch.float32).numpy())

    def new_kv(self, num_layers: int, num_kv_heads: int, head_dim: int, capacity: int) -> tuple[Tensor, Tensor]:
        """Keys and values [L, G, C, D]; contents undefined."""
        shape = (num_layers, num_kv_heads, capacity, head_dim)
        return (
            torch.empty(shape, dtype=self.dtype, device=self.device),
            torch.empty(shape, dtype=self.dtype, device=self.device),
        )

    # ---- operations

    def embed(self, table: Tensor, ids: npt.NDArray[np.int32]) -> Tensor:
        """Rows of an embedding table: ids [R] -> [R, K]."""
        return F.embedding(self._on_device(ids).long(), table)

    def select_rows(self, weight: Tensor, ids: npt.NDArray[np.int32]) -> Tensor:
        """Rows of a weight: [N, H] -> [len(ids), H]."""
        return weight[self._on_device(ids).long()]

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [R, K] -> [R, N]."""
        return F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Over the last axis, in at least float32; the normed value is rounded before the weight is applied."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return weight * normed.to(x.dtype)

    def rope(
        self, x: Tensor, positions: npt.NDArray[np.int32], inv_freq: npt.NDArray[np.float32], scale: float = 1.0
    ) -> Tensor:
        """Rotate the halves of each head by position: [R, heads, D] -> the same shape."""
        cos, sin = self._cos_sin(positions, inv_freq, scale)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def store(self, past: Past, k: Tensor, v: Tensor, bounds: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Write the rows into the caches, which never carry gradients; k and v come back as they are."""
        for slots, start, stop in zip(past.slots, bounds, bounds[1:], strict=False):
            room = slice(slots.end, slots.end + stop - start)
            slots.keys[past.layer, :, room] = k[start:stop].detach().transpose(0, 1)
            slots.values[past.layer, :, room] = v[start:stop].detach().transpose(0, 1)
        return k, v

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, past: Past | None, mask: Mask, window: int | None = None
    ) -> Tensor:
        """Scaled dot-product attention, one sequence of the call after the other: [R, Q * D]."""
        bounds = _segments(mask, len(q))
        patterns = self._allowed(mask, bounds, past, window)
        parts = []
        for index, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
            keys, values = k[start:stop].transpose(0, 1), v[start:stop].transpose(0, 1)
            if past is not None:
                keys, values = _with_past(past, index, keys, values)
            parts.append(_attend_segment(q[start:stop], keys, values, patterns[index]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(first half) * second half: [R, 2I] -> [R, I]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """x + y."""
        return x + y

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        """Arrays [R, N_i] side by side."""
        return torch.cat(list(parts), dim=-1)

    def stack(self, parts: Sequence[Tensor]) -> Tensor:
        """Arrays [R_i, N] under one another."""
        return torch.cat(list(parts))

    def argmax(self, x: Tensor) -> npt.NDArray[np.int64]:
        """The lowest index of the largest value of each row: [R, N] -> [R]."""
        return cast("npt.NDArray[np.int64]", x.argmax(-1).cpu().numpy())

    # ---- what the layers of one call share

    def _on_device(self, values: npt.NDArray[Any]) -> Tensor:
        return torch.tensor(values, device=self.device)

    def _cos_sin(
        self, positions: npt.NDArray[np.int32], inv_freq: npt.NDArray[np.float32], scale: float
    ) -> tuple[Tensor, Tensor]:
        last = self._angles
        if (
            last is None
            or last.inv_freq is not inv_freq
            or last.scale != scale
            or not np.array_equal(last.positions, positions)
        ):
            wide = torch.promote_types(self.dtype, torch.float32)
            angles = self._on_device(positions).float()[:, None, None] * self._on_device(inv_freq)
            cos, sin = (angles.to(wide).cos() * scale).to(self.dtype), (angles.to(wide).sin() * scale).to(self.dtype)
            self._angles = last = _Angles(positions.copy(), inv_freq, scale, cos, sin)
        return last.cos, last.sin

    def _allowed(self, mask: Mask, bounds: Sequence[int], past: Past | None, window: int | None) -> list[Tensor | None]:
        """For each sequence which keys each row sees, bool [M, past + M]; None where a row sees all."""
        pasts = tuple((s.length, s.pending) for s in past.slots) if past is not None else ((0, ()),) * (len(bounds) - 1)
        last = self._patterns
        if last is None or last.mask is not mask or last.pasts != pasts:
            self._patterns = last = _Patterns(mask, pasts)
        if window not in last.by_window:
            last.by_window[window] = [
                None if pattern.all() else self._on_device(pattern) for pattern in _patterns(mask, pasts, window)
            ]
        return last.by_window[window]


# ---------------------------------------------------------------------------------------------- attention


def _attend_segment(q: Tensor, keys: Tensor, values: Tensor, allowed: Tensor | None) -> Tensor:
    """q [M, Q, D] over keys and values [G, T, D] -> [M, Q * D].

    The query heads of one key/value head are laid under one another, so that keys are never repeated.
    """
    num_rows, num_heads, width = q.shape
    num_kv = keys.shape[0]
    shared = num_heads // num_kv
    queries = q.reshape(num_rows, num_kv, shared, width).permute(1, 2, 0, 3).reshape(num_kv, shared * num_rows, width)
    pattern = None if allowed is None else allowed.repeat(shared, 1)
    # A leading batch axis: torch's fused kernels take four axes only.
    out = F.scaled_dot_product_attention(queries[None], keys[None], values[None], attn_mask=pattern)[0]
    return out.reshape(num_kv, shared, num_rows, width).permute(2, 0, 1, 3).reshape(num_rows, num_heads * width)


def _with_past(past: Past, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """A sequence's cached keys and values followed by the call's own."""
    slots = past.slots[index]
    end = slots.end + keys.shape[1]
    if slots.keys.shape[2] >= end and not keys.requires_grad and not values.requires_grad:
        return slots.keys[past.layer, :, :end], slots.values[past.layer, :, :end]
    cached_keys, cached_values = slots.keys[past.layer, :, : slots.end], slots.values[past.layer, :, : slots.end]
    return torch.cat((cached_keys, keys), dim=1), torch.cat((cached_values, values), dim=1)


def _segments(mask: Mask, num_rows: int) -> tuple[int, ...]:
    return mask.bounds if isinstance(mask, Causal | Tree) else (0, num_rows)


def _patterns(
    mask: Mask, pasts: Sequence[tuple[int, tuple[int, ...]]], window: int | None
) -> list[npt.NDArray[np.bool_]]:
    """Which keys each row of each sequence sees, bool [M, past + M]."""
    if isinstance(mask, Dense):
        places = np.arange(len(mask.allowed))
        return [_narrowed(mask.allowed, places, places, window)]
    if isinstance(mask, Blocks):
        ids = mask.doc_ids
        same = ids[:, None] == ids[None, :]
        allowed = np.tril(same)
        places = allowed.sum(1) - 1
        return [_narrowed(allowed, places, places, window)]
    patterns = []
    for (length, pending), start, stop in zip(pasts, mask.bounds, mask.bounds[1:], strict=False):
        own, depths = _tree_pattern(mask, pending, start, stop)
        rows = length + depths
        columns = np.concatenate([np.arange(length), rows])
        own, rows = own[len(pending) :], rows[len(pending) :]
        allowed = np.concatenate([np.ones((stop - start, length), np.bool_), own], axis=1)
        patterns.append(_narrowed(allowed, rows, columns, window))
    return patterns


def _tree_pattern(
    mask: Causal | Tree, pending: tuple[int, ...], start: int, stop: int
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """What the rows of one sequence's tree, P pending and M own ones, see of each other, [P + M, P + M], and how far
    below the past each stands, [P + M]."""
    num_rows = len(pending) + stop - start
    places = np.arange(num_rows)
    last = places[len(pending) :] - 1 if isinstance(mask, Causal) else mask.parents[start:stop]
    parents = np.concatenate([np.array(pending, np.int64), np.asarray(last, np.int64)])
    if np.array_equal(parents, places - 1):
        return np.tri(num_rows, dtype=np.bool_), places
    own = np.eye(num_rows, dtype=np.bool_)
    for row, parent in enumerate(parents):
        if parent >= 0:
            own[row] |= own[parent]
    return own, own.sum(1) - 1


def _narrowed(
    allowed: npt.NDArray[np.bool_], rows: npt.NDArray[np.int64], columns: npt.NDArray[np.int64], window: int | None
) -> npt.NDArray[np.bool_]:
    """Only keys whose position is above the row's own minus the window."""
    return allowed if window is None else allowed & (columns[None, :] > rows[:, None] - window)
