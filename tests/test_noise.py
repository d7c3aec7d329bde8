"""Keyed noise: known answers, equal bits in three implementations, its law, and our own exp and log."""

from __future__ import annotations

import math
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sakiyomi.noise import PURPOSE_SEED, derive_seed, exact_exp, exact_log, fresh_seed, gumbel, philox, philox_words

TOP = 2**64 - 1
KEYS = [(0, 0), (1, 17), (TOP, 2**40), (0x123456789ABCDEF0, 2**33 + 5), (2**63, 4095), (2**32, 2**32)]
LOWEST, HIGHEST = -math.log(33 * math.log(2)), 33 * math.log(2)


@pytest.fixture(scope="module")
def native() -> ModuleType:
    return pytest.importorskip("sakiyomi._native", exc_type=ImportError)


# ---------------------------------------------------------------------------------------------- Philox


@pytest.mark.parametrize(
    ("seed", "t", "block", "purpose", "words"),
    [
        (0, 0, 0, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (TOP, TOP, 2**32 - 1, 2**32 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            0x299F31D0A4093822,
            0x0370734413198A2E,
            0x243F6A88,
            0x85A308D3,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_published_answers(seed: int, t: int, block: int, purpose: int, words: tuple[int, ...]):
    found = philox_words(seed, t, np.array([block]), purpose)
    assert tuple(int(word[0]) for word in found) == words


def test_an_id_takes_its_word_of_its_block():
    found = philox(5, 9, np.arange(64))
    words = philox_words(5, 9, np.arange(16))
    np.testing.assert_array_equal(found, np.stack(words, axis=1).reshape(-1))


def test_purposes_and_positions_give_other_bits():
    ids = np.arange(4096)
    rows = [philox(seed, t, ids, purpose) for seed in (0, 2**32) for t in (0, 1, 2**32) for purpose in (0, 1)]
    for i, row in enumerate(rows):
        for other in rows[:i]:
            assert (row == other).mean() < 0.001


# ---------------------------------------------------------------------------------------------- three implementations


@pytest.mark.parametrize(("seed", "t"), KEYS)
def test_cpp_noise_has_the_same_bits(native: ModuleType, seed: int, t: int):
    ids = np.random.default_rng(t % 1000).integers(0, 2**18, 2**18)
    np.testing.assert_array_equal(native.gumbel(seed, t, ids).view(np.int64), gumbel(seed, t, ids).view(np.int64))


@pytest.mark.parametrize(("seed", "t"), KEYS)
def test_torch_noise_has_the_same_bits(seed: int, t: int):
    torch = pytest.importorskip("torch")
    from sakiyomi.ops.torch_noise import gumbel_torch

    torch.set_num_threads(1)
    ids = np.random.default_rng(t % 1000).integers(0, 2**18, 2**18)
    found = gumbel_torch(seed, t, torch.from_numpy(ids)).numpy()
    np.testing.assert_array_equal(found.view(np.int64), gumbel(seed, t, ids).view(np.int64))


@given(st.integers(0, TOP), st.integers(0, TOP), st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20))
def test_noise_is_a_function_of_the_key_alone(seed: int, t: int, ids: list[int]):
    together = gumbel(seed, t, np.array(ids))
    assert [gumbel(seed, t, np.array([token]))[0] for token in ids] == together.tolist()
    assert together.min() >= LOWEST
    assert together.max() <= HIGHEST


# ---------------------------------------------------------------------------------------------- the law


def test_ten_million_draws_follow_the_gumbel_law(native: ModuleType):
    ids = np.arange(10**6)
    draws = np.sort(np.concatenate([native.gumbel(2024, t, ids) for t in range(10)]))
    # Kolmogorov-Smirnov: the distance of the two distribution functions.
    law = np.exp(-np.exp(-draws))
    steps = np.arange(draws.size + 1) / draws.size
    distance = max(np.abs(law - steps[1:]).max(), np.abs(law - steps[:-1]).max())
    assert stats.kstwobign.sf(distance * math.sqrt(draws.size)) > 1e-4
    # Chi-square on bins that resolve both tails: 100 of equal weight, the outer ones cut again in powers of ten.
    tails = [10.0**-k for k in range(3, 7)]
    levels = np.array(sorted([*tails, *np.arange(1, 100) / 100, *(1 - tail for tail in tails)]))
    edges = -np.log(-np.log(levels))
    counts = np.diff(np.concatenate([[0], np.searchsorted(draws, edges), [draws.size]]))
    weights = np.diff(np.concatenate([[0.0], levels, [1.0]]))
    assert stats.chisquare(counts, weights * draws.size).pvalue > 1e-4


def test_the_far_tail_has_its_share(native: ModuleType):
    """Noise above 12 has probability 6e-6: a float32 uniform or a careless log1p would leave gaps here."""
    draws = np.concatenate([native.gumbel(7, t, np.arange(10**6)) for t in range(5)])
    far = np.sort(draws[draws > 9.0]) - 9.0
    expected = draws.size * -math.expm1(-math.exp(-9.0))
    assert abs(far.size - expected) < 5 * math.sqrt(expected)
    assert stats.kstest(far, "expon").pvalue > 1e-3
    assert np.unique(far).size > 0.99 * far.size


@pytest.mark.parametrize("other", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (2**32, 0, 0), (0, 2**32, 0), (0, 0, 4)])
def test_neighbouring_keys_are_uncorrelated(other: tuple[int, int, int]):
    seeds, ids = range(100, 120), np.arange(0, 40000, 8)
    here = np.concatenate([gumbel(seed, 5, ids) for seed in seeds])
    there = np.concatenate([gumbel(seed + other[0], 5 + other[1], ids + other[2]) for seed in seeds])
    for correlation in (stats.pearsonr(here, there), stats.spearmanr(here, there)):
        assert abs(correlation.statistic) < 4.5 / math.sqrt(here.size)


# ---------------------------------------------------------------------------------------------- seeds


def test_sample_zero_has_the_requests_own_seed():
    assert derive_seed(TOP, 0) == TOP


def test_derived_seeds_are_distinct_and_stay():
    derived = {derive_seed(seed, sample) for seed in (0, 1, 2**32, TOP) for sample in range(200)}
    assert len(derived) == 4 * 200
    assert all(0 <= seed <= TOP for seed in derived)
    words = philox_words(3, 0, np.array([1]), PURPOSE_SEED)
    assert derive_seed(3, 1) == int(words[0][0]) + (int(words[1][0]) << 32)
    assert derive_seed(3, 1).bit_length() > 32


def test_fresh_seeds_fit_a_signed_integer():
    seeds = {fresh_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**63 for seed in seeds)


# ---------------------------------------------------------------------------------------------- log and exp


def _ulps(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest error in units of the last place; `wanted` in long double, which carries 11 bits more."""
    spacing = np.spacing(np.abs(wanted.astype(np.float64))).astype(np.longdouble)
    return float((np.abs(found.astype(np.longdouble) - wanted) / spacing).max())


needs_long_double = pytest.mark.skipif(
    np.finfo(np.longdouble).nmant < 63, reason="long double is no wider than double here"
)


@needs_long_double
def test_log_is_within_an_ulp():
    rng = np.random.default_rng(1)
    near_one = 1.0 + rng.uniform(-1, 1, 20000) * 2.0 ** -rng.integers(1, 52, 20000)
    subnormal = 5e-324 * np.floor(2.0 ** rng.uniform(0, 52, 2000))
    x = np.concatenate([near_one, subnormal, np.exp(rng.uniform(-700, 700, 20000)), 1 - 2.0 ** -np.arange(1, 54)])
    x = x[x != 1.0]
    assert _ulps(exact_log(x), np.log(x.astype(np.longdouble))) < 1.0


@needs_long_double
def test_exp_is_within_an_ulp():
    rng = np.random.default_rng(2)
    x = np.concatenate([rng.uniform(-708, 709.7, 20000), rng.uniform(-40, 0, 50000), rng.normal(size=5000) * 1e-3])
    assert _ulps(exact_exp(x), np.exp(x.astype(np.longdouble))) < 1.0


def test_log_at_the_edges():
    inf, nan = math.inf, math.nan
    x = np.array([0.0, -0.0, -1.0, -inf, inf, nan, 1.0, 5e-324, 2.0**-1022, 1.7976931348623157e308])
    wanted = [-inf, -inf, nan, nan, inf, nan, 0.0, math.log(5e-324), math.log(2.0**-1022), math.log(x[-1])]
    np.testing.assert_allclose(exact_log(x), wanted, rtol=3e-16)
    assert exact_log(2.0) == math.log(2)


def test_exp_at_the_edges():
    inf, nan = math.inf, math.nan
    top = 709.782712893384
    x = np.array([0.0, -0.0, 1.0, -inf, inf, nan, -709.0, -1e300, 1e300, top, -708.0])
    wanted = [1.0, 1.0, math.e, 0.0, inf, nan, 0.0, 0.0, inf, math.exp(top), math.exp(-708.0)]
    np.testing.assert_allclose(exact_exp(x), wanted, rtol=3e-16)
    assert exact_exp(0.0) == 1.0


def test_cpp_exp_and_log_have_the_same_bits(native: ModuleType):
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 2**64, 2**17, np.uint64).view(np.float64)
    x = np.concatenate([bits[~np.isnan(bits)], rng.uniform(-750, 750, 2**17), rng.uniform(-40, 2, 2**17)])
    x = np.concatenate([x, [0.0, -0.0, np.inf, -np.inf, 1.0, 5e-324, -708.4, -708.0499, -708.04]])
    np.testing.assert_array_equal(native.exact_exp(x).view(np.int64), exact_exp(x).view(np.int64))
    np.testing.assert_array_equal(native.exact_log(x).view(np.int64), exact_log(x).view(np.int64))
