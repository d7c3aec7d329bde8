"""The layout of a cache in 8 bits, read in plain numpy."""

from __future__ import annotations

from typing import Any

import numpy as np


def unpack(keys: Any, values: Any, dim: int) -> tuple[Any, Any]:
    """Keys and values [L, G, C, D] in float32 of arrays that `NativeOps.new_kv` made for int8."""
    layers, heads, blocks, _ = keys.shape
    groups, parts = -(-dim // 32), -(-dim // 16)
    packed = keys.reshape(layers, heads, blocks, 2, groups, 576)
    scales = packed[..., 512:].copy().view(np.float32)
    numbers = packed[..., :512].reshape(layers, heads, blocks, 2, groups, 8, 16, 4).astype(np.float32) - 128
    rows = (numbers * scales[:, :, :, :, :, None, :, None]).transpose(0, 1, 2, 3, 6, 4, 5, 7)
    scales = values[..., parts * 512 :].copy().view(np.float32).reshape(layers, heads, blocks, 8, 4)
    numbers = values[..., : parts * 512].reshape(layers, heads, blocks, parts, 8, 16, 4).astype(np.float32) - 128
    columns = (numbers * scales[:, :, :, None, :, None, :]).transpose(0, 1, 2, 4, 6, 3, 5)
    shape = (layers, heads, blocks * 32)
    return rows.reshape(*shape, groups * 32)[..., :dim], columns.reshape(*shape, parts * 16)[..., :dim]
