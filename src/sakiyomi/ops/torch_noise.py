"""The keyed noise of noise.py as torch operations, bit for bit the same.

One eager operation per rounding; a compiler that fuses them (torch.compile) may contract and lose the last bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sakiyomi.noise import (
    LN2_HIGH,
    LN2_LOW,
    LOG_TERMS,
    MANTISSA_MASK,
    ONE_BITS,
    PHILOX_MULTIPLIERS,
    PHILOX_ROUNDS,
    PHILOX_WEYL,
    PURPOSE_MATCH,
    SQRT_HALF_BITS,
)

WORD = 0xFFFFFFFF


def gumbel_torch(seed: int, t: int, ids: Tensor) -> Tensor:
    """Standard Gumbel noise of the tokens `ids` at position `t`: the values of `noise.gumbel`.

    Args:
        seed: the key, 0 to 2^64 - 1.
        t: index of the token in its sequence.
        ids: token ids, any integer type and shape.

    Returns:
        float64, shape and device of `ids`.
    """
    word = _philox(seed, t, ids.to(torch.int64)).to(torch.float64)
    exponential = -_log_normal(1.0 - (word + 0.5) * 2.0**-32)
    return -_log_normal(exponential)


def _philox(seed: int, t: int, ids: Tensor) -> Tensor:
    """32 random bits per id, in int64: word id % 4 of the Philox block id // 4."""
    # A product of two 32-bit words may wrap to a negative int64; its bits are those of the unsigned product, and the
    # masks keep the right 32 of them.
    c0 = (ids >> 2) & WORD
    c1, c2, c3 = (torch.full_like(ids, value) for value in (PURPOSE_MATCH, t & WORD, t >> 32))
    key0, key1 = seed & WORD, seed >> 32
    for _ in range(PHILOX_ROUNDS):
        product0, product1 = c0 * PHILOX_MULTIPLIERS[0], c2 * PHILOX_MULTIPLIERS[1]
        c0 = ((product1 >> 32) & WORD) ^ c1 ^ key0
        c2 = ((product0 >> 32) & WORD) ^ c3 ^ key1
        c1, c3 = product1 & WORD, product0 & WORD
        key0, key1 = (key0 + PHILOX_WEYL[0]) & WORD, (key1 + PHILOX_WEYL[1]) & WORD
    return torch.stack((c0, c1, c2, c3), dim=-1).gather(-1, (ids & 3).unsqueeze(-1)).squeeze(-1)


def _log_normal(x: Tensor) -> Tensor:
    """log of positive normal x, step for step as in noise.py."""
    shifted = x.view(torch.int64) + (ONE_BITS - SQRT_HALF_BITS)
    k = (shifted >> 52).to(torch.float64) - 1023.0
    f = ((shifted & MANTISSA_MASK) + SQRT_HALF_BITS).view(torch.float64) - 1.0
    s = f / (2.0 + f)
    z = s * s
    tail = torch.full_like(z, LOG_TERMS[-1])
    for term in reversed(LOG_TERMS[:-1]):
        tail = tail * z + term
    tail = tail * z
    return k * LN2_HIGH + (f - (s * (f - tail) - k * LN2_LOW))
