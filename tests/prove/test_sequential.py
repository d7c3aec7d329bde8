"""The tests keep their promise of few false alarms, and notice what they say they notice."""

from __future__ import annotations

from math import inf, log

import numpy as np
import pytest

from sakiyomi.prove.sequential import CellTest, TiltTest, e_to_text, least_cell_deviation, least_tilt, log_mean_exp

PROBS = np.array([0.4, 0.3, 0.2, 0.1])


def largest_e(test: CellTest, draws: np.ndarray) -> float:
    highest = 0.0
    for cell in draws:
        test.add(int(cell))
        highest = max(highest, test.log_e)
    return highest


def test_an_e_value_has_mean_one_under_the_law() -> None:
    """Exactly, over all outcomes of five draws."""
    total = 0.0
    for outcome in np.ndindex(3, 3, 3, 3, 3):
        test = CellTest(PROBS[:3] / PROBS[:3].sum())
        for cell in outcome:
            test.add(cell)
        total += np.prod(test.probs[list(outcome)]) * np.exp(test.log_e)
    assert total == pytest.approx(1, abs=1e-12)


def test_a_tilt_has_mean_one_under_laws_that_differ() -> None:
    probs = (0.1, 0.5, 0.93, 0.3)
    total = 0.0
    for outcome in np.ndindex(2, 2, 2, 2):
        test, weight = TiltTest(), 1.0
        for inside, p in zip(outcome, probs, strict=True):
            test.add(bool(inside), p)
            weight *= p if inside else 1 - p
        total += weight * np.exp(test.log_e)
    assert total == pytest.approx(1, abs=1e-12)


def test_false_alarms_stay_within_their_bound_at_any_time() -> None:
    """At a bound of 1 / 10 so that a few hundred runs can tell; looks happen after every draw."""
    rng = np.random.default_rng(1)
    num_runs, alarms = 300, 0
    for _ in range(num_runs):
        alarms += largest_e(CellTest(PROBS), rng.choice(4, 300, p=PROBS)) >= log(10)
    assert alarms / num_runs <= 0.1


def test_a_deviation_of_the_stated_size_is_noticed() -> None:
    num_draws, threshold = 1000, log(1000)
    least = least_cell_deviation(PROBS, num_draws, threshold, 0.95)
    assert 0.03 < least < 0.2
    rng = np.random.default_rng(2)
    half = np.array([True, False, False, True])  # 0.5: the direction that hides best
    moved = np.where(half, PROBS * (1 + least / 0.5), PROBS * (1 - least / 0.5))
    found = [largest_e(CellTest(PROBS), rng.choice(4, num_draws, p=moved)) >= threshold for _ in range(60)]
    assert np.mean(found) >= 0.85
    assert least_cell_deviation(PROBS, 4 * num_draws, threshold, 0.95) < least
    assert least_cell_deviation(PROBS, 5, threshold, 0.95) == 1.0


def test_a_tilt_of_the_stated_size_is_noticed() -> None:
    rng = np.random.default_rng(3)
    probs = rng.uniform(0.1, 0.6, 3000)
    least = least_tilt(probs, log(1000), 0.95)
    found = 0
    for _ in range(40):
        test = TiltTest()
        for p in probs:
            test.add(bool(rng.random() < p + least), p)
        found += test.log_e >= log(1000)
    assert 0.01 < least < 0.1
    assert found >= 34


def test_what_cannot_happen_is_an_infinite_e_value() -> None:
    test = CellTest(np.array([1.0, 0.0]))
    test.add(1)
    assert test.log_e == inf
    assert e_to_text(inf) == "infinite"
    assert e_to_text(log(1000)) == "1e+03"
    assert e_to_text(230.2585) == "10^100"
    assert log_mean_exp([0.0, inf]) == inf
