"""The arithmetic of speculation, by hand, by table and against brute force."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence as Seq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sakiyomi.plan.speedup import (
    best_length,
    count_worthwhile,
    expected_tokens,
    geometric_tokens,
    schedule,
    speedup,
    survivals,
)


def test_by_hand() -> None:
    assert survivals([0.5, 0.5, 1.0]) == [0.5, 0.25, 0.25]
    assert expected_tokens([0.5, 0.25]) == 1.75
    # A draft of two tokens for a tenth of a pass each, checked in a pass of 1.2: 1.75 tokens for 1.4.
    assert speedup([0.5, 0.25], 1.2, 0.2) == pytest.approx(1.25)
    assert speedup([0.5, 0.25], 1.2, 0.2, overhead=0.35) == pytest.approx(1.0)
    assert speedup([], 1.0) == 1.0


@pytest.mark.parametrize(
    ("acceptance", "expected"),
    [(0.6, (2.18, 2.46, 2.50)), (0.7, (2.53, 3.14, 3.32)), (0.8, (2.95, 4.16, 4.86)), (0.9, (3.44, 5.70, 8.15))],
)
def test_tokens_at_a_constant_acceptance(acceptance: float, expected: tuple[float, ...]) -> None:
    assert [round(geometric_tokens(acceptance, k), 2) for k in (3, 7, 15)] == list(expected)


@given(st.floats(0, 0.99), st.integers(0, 20))
def test_geometric_sum(acceptance: float, k: int) -> None:
    assert geometric_tokens(acceptance, k) == pytest.approx((1 - acceptance ** (k + 1)) / (1 - acceptance))


@pytest.mark.parametrize(
    ("acceptance", "cost", "length", "speed"), [(0.8, 0.05, 8, 3.09), (0.8, 0.1, 6, 2.47), (0.6, 0.1, 3, 1.67)]
)
def test_best_length_of_an_autoregressive_drafter(acceptance: float, cost: float, length: int, speed: float) -> None:
    a = survivals([acceptance] * 30)
    found = best_length(a, lambda k: k * cost, lambda rows: 1.0)
    assert found == length
    assert speedup(a[:found], 1.0, found * cost) == pytest.approx(speed, abs=0.005)


def test_nothing_is_drafted_where_nothing_pays() -> None:
    assert best_length([0.1, 0.05], lambda k: 0.3 if k else 0.0, lambda rows: 1.0) == 0


def _staircase(rng: random.Random, rows: int) -> list[float]:
    """An ascending cost with flat parts and jumps."""
    seconds = [1.0]
    for _ in range(rows):
        seconds.append(seconds[-1] + (rng.random() if rng.random() < 0.4 else 0.0))
    return seconds


def _descending(rng: random.Random, length: int) -> list[float]:
    return survivals(rng.random() for _ in range(length))


@pytest.mark.parametrize("seed", range(250))
def test_schedule_is_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    a = [_descending(rng, rng.randint(0, 4)) for _ in range(rng.randint(1, 4))]
    base = len(a) + rng.choice((0, 0, 5))
    costs, draft_s = _staircase(rng, 40), rng.choice((0.0, 0.5))

    def speed(lengths: Seq[int]) -> float:
        tokens = len(a) + sum(sum(own[:length]) for own, length in zip(a, lengths, strict=True))
        return tokens / (draft_s + costs[base + sum(lengths)])

    lengths = schedule(a, costs.__getitem__, draft_seconds=draft_s, num_base_rows=base)
    assert all(0 <= length <= len(own) for own, length in zip(a, lengths, strict=True))
    everything = itertools.product(*(range(len(own) + 1) for own in a))
    assert speed(lengths) == pytest.approx(max(map(speed, everything)))


def test_schedule_at_its_ends() -> None:
    a = [[0.9, 0.8], [0.3]]
    assert schedule(a, float) == [0, 0]  # a row costs what a token brings at best
    assert schedule(a, lambda rows: 1.0) == [2, 1]
    assert schedule(a, float, least=1) == [1, 1]
    assert schedule([[], []], lambda rows: 1.0, least=3) == [0, 0]


@given(st.integers(0, 10_000))
def test_dearer_drafts_are_never_checked_less(seed: int) -> None:
    rng = random.Random(seed)
    a, costs = [_descending(rng, 6) for _ in range(3)], _staircase(rng, 30)
    counts = [sum(schedule(a, costs.__getitem__, draft_seconds=s)) for s in (0.0, 0.5, 2.0, 10.0)]
    assert counts == sorted(counts)


@given(st.integers(0, 10_000), st.floats(0, 3))
def test_worthwhile_nodes_are_brute_force(seed: int, rate: float) -> None:
    rng = random.Random(seed)
    gains, seconds = _descending(rng, rng.randint(0, 8)), _staircase(rng, 8)

    def worth(count: int) -> float:
        return sum(gains[:count]) - rate * (seconds[count] - seconds[0])

    assert worth(count_worthwhile(gains, seconds, rate)) == pytest.approx(max(map(worth, range(len(gains) + 1))))


@given(st.integers(0, 10_000))
def test_at_its_own_speed_the_rate_finds_the_best_ratio(seed: int) -> None:
    rng = random.Random(seed)
    gains, seconds = _descending(rng, 8), _staircase(rng, 8)
    best = max((1 + sum(gains[:k])) / seconds[k] for k in range(9))
    k = count_worthwhile(gains, seconds, best)
    assert (1 + sum(gains[:k])) / seconds[k] == pytest.approx(best)
