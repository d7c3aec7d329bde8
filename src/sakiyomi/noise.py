"""Keyed noise: the randomness of a token is a pure function of (seed, position, id).

The rules that keep the distribution (verify/) and the drafters that sample for them never key by position: they look
at a token before they decide to stop in front of it, so noise that came back at that position would be conditioned on
the decision. Theirs is keyed by (seed, step, node, purpose, id), see `NoiseKey`.

Philox4x32-10 (Salmon, Moraes, Dror and Shaw, 2011, "Parallel random numbers: as easy as 1, 2, 3") turns the key
`seed` and the counter (id // 4, purpose, position) into four words; word id % 4 becomes a standard Gumbel variate by a
logarithm of our own. `exact_log` and `exact_exp` use nothing but IEEE 754 double additions, subtractions,
multiplications, divisions and integer operations in a fixed order, so that this file, csrc/noise.hpp and
ops/torch_noise.py give the same bits on every machine.
"""

from __future__ import annotations

import secrets
from math import factorial
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Float64s: TypeAlias = npt.NDArray[np.float64]
Uint32s: TypeAlias = npt.NDArray[np.uint32]

PURPOSE_MATCH = 0  # the noise that chooses tokens
PURPOSE_SEED = 1  # seeds of further samples
PURPOSE_DRAFT = 2  # draws of drafters that sample
PURPOSE_ACCEPT = 3  # coins of the rules that keep the distribution
PURPOSE_CORRECT = 4  # the token that such a rule draws behind the last accepted one

PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10

LN2_HIGH = float.fromhex("0x1.62e42feep-1")  # 32 bits: a multiple by an exponent is exact
LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
LOG2_E = float.fromhex("0x1.71547652b82fep+0")
SQRT_HALF_BITS = 0x3FE6A09E667F3BCD  # of the double nearest to sqrt(1/2)
ONE_BITS = 0x3FF0000000000000
MANTISSA_MASK = 0x000FFFFFFFFFFFFF
ROUNDING = 1.5 * 2.0**52  # adding it leaves the nearest integer in the low bits
LOG_TERMS = tuple(2.0 / (2 * k + 1) for k in range(1, 11))  # of 2 atanh(s) / s - 2 in s^2
EXP_TERMS = tuple(1.0 / factorial(k) for k in range(2, 14))  # of (e^r - 1 - r) / r^2 in r
EXP_LOWEST = float.fromhex("-0x1.6232bdd7abcd2p+9")  # -1022 log 2, where the scale of exact_exp becomes 0
EXP_HIGHEST = float.fromhex("0x1.62e42fefa39efp+9")  # the largest double whose exponential is finite


class NoiseKey(NamedTuple):
    """What the draws of a distribution rule are keyed by, beside the id.

    Attributes:
        seed: the sequence's, 0 to 2^64 - 1.
        step: number of the step, never the same twice in a sequence, 0 to 2^32 - 1.
        node: the draft node, -1 the root, below 2^32 - 1.
        purpose: PURPOSE_DRAFT, PURPOSE_ACCEPT or PURPOSE_CORRECT.
    """

    seed: int
    step: int
    node: int
    purpose: int

    @property
    def counter(self) -> int:
        """Step and node where the noise of `match` has the position."""
        return self.step | (self.node + 1) << 32


class Randomness(Protocol):
    """Where sampling drafters and distribution rules get chance from: keyed noise, or a test that tries everything.

    Draws with different keys are independent.
    """

    def flip(self, key: NoiseKey, p: float, q: float = 1.0) -> bool:
        """True with probability min(1, p / q); never for p = 0."""
        ...

    def draw(self, key: NoiseKey, ids: npt.NDArray[Any], probs: Float64s, count: int = 1) -> list[int]:
        """Ids drawn by `probs` [K] without replacement, in the order of drawing; fewer where fewer are possible."""
        ...


def uniform(key: NoiseKey) -> float:
    """A uniform number in [0, 1) with 53 bits."""
    words = philox_words(key.seed, key.counter, np.zeros(1, np.uint32), key.purpose)
    high, low = int(words[0][0]) >> 5, int(words[1][0]) >> 6
    return ((high << 26) + low) * 2.0**-53


def gumbel(seed: int, t: int, ids: npt.NDArray[Any], purpose: int = PURPOSE_MATCH) -> Float64s:
    """Standard Gumbel noise of the tokens `ids` at absolute position `t`.

    Args:
        seed: the key, 0 to 2^64 - 1.
        t: index of the token in its sequence, 0 to 2^64 - 1.
        ids: token ids [N], 0 to 2^32 - 1.

    Returns:
        float64 [N], from -3.14 to 22.88.
    """
    word = philox(seed, t, ids, purpose).astype(np.float64)
    # u = (word + 1/2) / 2^32 has 33 bits, so 1 - u is exact, and its logarithm is exact to the last bits for small u,
    # where the largest noise comes from.
    exponential = -_log_normal(1.0 - (word + 0.5) * 2.0**-32)
    return -_log_normal(exponential)


def philox(seed: int, t: int, ids: npt.NDArray[Any], purpose: int = PURPOSE_MATCH) -> Uint32s:
    """32 random bits for each id [N]: word id % 4 of the Philox block id // 4."""
    ids = np.asarray(ids).astype(np.uint64)
    words = philox_words(seed, t, ids >> np.uint64(2), purpose)
    return np.choose((ids & np.uint64(3)).astype(np.intp), words)


def philox_words(seed: int, t: int, blocks: npt.NDArray[Any], purpose: int = PURPOSE_MATCH) -> tuple[Uint32s, ...]:
    """Philox4x32-10 with key (seed low, seed high) and counter (block, purpose, t low, t high): four words [N]."""
    low = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    multiplier0, multiplier1 = (np.uint64(value) for value in PHILOX_MULTIPLIERS)
    c0 = np.asarray(blocks).astype(np.uint64) & low
    c1, c2, c3 = (np.full_like(c0, value) for value in (purpose, t & 0xFFFFFFFF, t >> 32))
    key0, key1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(PHILOX_ROUNDS):
        product0, product1 = c0 * multiplier0, c2 * multiplier1
        c0 = (product1 >> shift) ^ c1 ^ np.uint64(key0)
        c2 = (product0 >> shift) ^ c3 ^ np.uint64(key1)
        c1, c3 = product1 & low, product0 & low
        key0, key1 = (key0 + PHILOX_WEYL[0]) & 0xFFFFFFFF, (key1 + PHILOX_WEYL[1]) & 0xFFFFFFFF
    return c0.astype(np.uint32), c1.astype(np.uint32), c2.astype(np.uint32), c3.astype(np.uint32)


def derive_seed(seed: int, sample: int) -> int:
    """The seed of sample number `sample` of a request: the request's own for sample 0, else 64 hashed bits."""
    if sample == 0:
        return seed
    words = philox_words(seed, 0, np.array([sample]), PURPOSE_SEED)
    return int(words[0][0]) | int(words[1][0]) << 32


def fresh_seed() -> int:
    """A seed from the operating system's entropy, below 2^63: a signed 64-bit integer holds it."""
    return secrets.randbits(63)


def exact_log(x: npt.ArrayLike) -> Float64s:
    """Natural logarithm of doubles, within 1 ulp; log(0) = -inf, negative and nan give nan."""
    x = np.asarray(x, np.float64)
    is_subnormal = x < 2.0**-1022
    with np.errstate(invalid="ignore", over="ignore"):
        usual = (x > 0) & (x < np.inf)
        scaled = np.where(usual, np.where(is_subnormal, x * 2.0**54, x), 1.0)
        result = _log_normal(scaled, np.where(is_subnormal, 54.0, 0.0))
    special = np.where(x == 0, -np.inf, np.where(x > 0, x, np.nan))
    return np.where(usual, result, special)


def _log_normal(x: Float64s, down: Float64s | float = 0.0) -> Float64s:
    """log(x * 2^-down) of positive normal finite x = 2^k m, m in [sqrt(1/2), sqrt(2))."""
    shifted = x.view(np.int64) + (ONE_BITS - SQRT_HALF_BITS)
    k = (shifted >> 52).astype(np.float64) - 1023.0 - down
    f = ((shifted & MANTISSA_MASK) + SQRT_HALF_BITS).view(np.float64) - 1.0
    # log(1 + f) = 2 atanh(s) with s = f / (2 + f), and 2 s = f - s f, which keeps f itself exact.
    s = f / (2.0 + f)
    z = s * s
    tail = np.full_like(z, LOG_TERMS[-1])
    for term in reversed(LOG_TERMS[:-1]):
        tail = tail * z + term
    tail = tail * z
    return k * LN2_HIGH + (f - (s * (f - tail) - k * LN2_LOW))


def exact_exp(x: npt.ArrayLike) -> Float64s:
    """Exponential of doubles, within 1 ulp; below -708.04 it is 0 (no subnormal results), nan gives nan."""
    x = np.asarray(x, np.float64)
    inside = np.clip(x, EXP_LOWEST, EXP_HIGHEST)
    shifted = inside * LOG2_E + ROUNDING
    k = shifted - ROUNDING
    r = (inside - k * LN2_HIGH) - k * LN2_LOW
    tail = np.full_like(r, EXP_TERMS[-1])
    for term in reversed(EXP_TERMS[:-1]):
        tail = tail * r + term
    mantissa = 1.0 + (r + (r * r) * tail)
    with np.errstate(invalid="ignore"):
        # One less in the exponent, since 2^1024 is no double; k = -1022 leaves the bits of 0.
        half_scale = ((k + 1022.0).astype(np.int64) << 52).view(np.float64)
    result = (mantissa * 2.0) * half_scale
    return np.where(x > EXP_HIGHEST, np.inf, np.where(np.isnan(x), np.nan, result))
