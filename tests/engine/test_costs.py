"""What passes and drafts cost, learnt from noisy times."""

from __future__ import annotations

import random

import pytest

from sakiyomi.engine.costs import DraftCosts, PassCosts, prior_cost


def _truth(rows: int, context: float) -> float:
    """Another machine than the prior's: dear rows, and a step behind 4 of them."""
    return 0.004 * (1 + 0.2 * (rows - 1) + (0.5 if rows > 4 else 0) + 1e-3 * context)


def _learn(noise: float, num_records: int = 600, seed: int = 0) -> PassCosts:
    rng = random.Random(seed)
    costs = PassCosts()
    for _ in range(num_records):
        rows, context = rng.choice((1, 1, 1, 2, 3, 4, 5, 8)), rng.choice((100, 500))
        spike = 20.0 if rng.random() < noise else 1.0
        costs.record(rows, context, _truth(rows, context) * rng.uniform(0.97, 1.03) * spike)
    return costs


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_seen_rows_are_known_whatever_the_disturbances(noise: float) -> None:
    costs = _learn(noise)
    for context in (100, 500):
        curve = costs.curve(context, 16)
        for rows in (1, 2, 3, 4, 5, 8):
            # A bin spans a doubling of the context, so its own middle is what it tells.
            assert curve[rows] == pytest.approx(_truth(rows, context), rel=0.15)
        assert curve[5] / curve[4] == pytest.approx(_truth(5, context) / _truth(4, context), rel=0.06)


def test_unseen_rows_lie_between_their_neighbours_and_follow_the_prior_beyond() -> None:
    curve = _learn(0.0).curve(100, 32)
    assert curve[5] <= curve[6] <= curve[7] <= curve[8]
    ratio = curve[16] / curve[8]
    assert 0.8 < ratio / (prior_cost(16, 100) / prior_cost(8, 100)) < 1.2
    assert list(curve) == sorted(curve)


def test_a_machine_that_gets_slower_is_followed() -> None:
    costs = _learn(0.0)
    before = costs.curve(100, 4)[1]
    for _ in range(64):
        costs.record(1, 100, 3 * _truth(1, 100))
    assert costs.curve(100, 4)[1] == pytest.approx(3 * before, rel=0.25)


def test_before_anything_is_known_a_plain_step_is_the_unit() -> None:
    costs = PassCosts()
    assert not costs.is_known
    assert costs.curve(0, 4)[1] == pytest.approx(1.0, abs=0.05)
    assert len(costs.curve(0, 100)) > 100
    costs.record(1, 10, 0.5)
    assert costs.is_known


def test_drafts_are_medians_by_size_and_in_proportion_elsewhere() -> None:
    costs = DraftCosts()
    assert costs.seconds(4) == costs.least == 0.0
    for seconds in (1.0, 50.0, 1.2):
        costs.record(4, seconds)
    assert costs.seconds(4) == 1.2
    assert costs.seconds(8) == pytest.approx(2.4)
    assert costs.seconds(1) == pytest.approx(0.3)
    costs.record(1, 0.9)
    assert (costs.seconds(1), costs.seconds(2), costs.least) == (0.9, pytest.approx(1.8), 0.9)
