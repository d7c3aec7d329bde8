"""The timed loop: who runs when, and what is made of the times."""

from __future__ import annotations

from pathlib import Path

import pytest

from sakiyomi.assemble import LoadedModel
from sakiyomi.llm import LLM
from sakiyomi.measure import (
    Comparison,
    Spread,
    Trial,
    Trials,
    Way,
    answer_with,
    compare_speeds,
    median_speed,
    outputs_of,
    rotate,
)
from sakiyomi.models.toy import ToyModel, scripted_law
from sakiyomi.params import SamplingParams


def test_ways_take_turns_and_each_is_first_and_last_equally_often() -> None:
    log: list[str] = []

    def way(name: str) -> Way[int]:
        def run(case: int) -> Trial:
            log.append(f"{name}{case}")
            return Trial(1.0 + case, output=case)

        return run

    trials = Comparison({name: way(name) for name in "abc"}, num_rounds=6, num_warm_ups=2).run([0, 1])
    assert log[:6] == ["a0", "b0", "c0"] * 2  # warming up
    rounds = [log[i : i + 3] for i in range(6, len(log), 3)]
    assert len(rounds) == 12
    assert all(sorted(one) == ["a0", "b0", "c0"] for one in rounds[:6])
    for place in (0, 2):
        assert sorted(one[place] for one in rounds[:6]) == ["a0", "a0", "b0", "b0", "c0", "c0"]
    assert [[trial.output for trial in one] for one in trials["b"]] == [[0] * 6, [1] * 6]


def test_rounds_run_forwards_and_backwards() -> None:
    assert [rotate("ab", number) for number in range(4)] == [["a", "b"], ["b", "a"], ["b", "a"], ["a", "b"]]
    assert rotate("a", 7) == ["a"]


def test_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    way = {"a": lambda case: Trial(1.0), "b": lambda case: Trial(1.0)}
    Comparison(way, num_rounds=2, report=lambda what, done, total: told.append((done, total))).run([None])
    assert told == [(0, 4), (0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]


def _trials(*rounds: list[float]) -> Trials:
    return [[Trial(seconds, 10) for seconds in one] for one in rounds]


def test_speeds_are_compared_by_the_time_of_the_whole() -> None:
    base = _trials([2.0, 2.0, 2.0], [1.0, 1.0, 1.0])
    other = _trials([1.0, 1.0, 1.0], [1.0, 1.0, 1.0])
    # 3 seconds against 2, although the mean of the ratios 2 and 1 is 1.5 by chance too: weigh the other way round.
    assert compare_speeds(base, other).value == pytest.approx(1.5)
    assert compare_speeds(other, base).value == pytest.approx(2 / 3)
    uneven = compare_speeds(_trials([9.0], [1.0]), _trials([9.0], [0.5]))
    assert uneven.value == pytest.approx(10 / 9.5)
    assert uneven.low <= uneven.value <= uneven.high


def test_one_disturbed_round_changes_nothing() -> None:
    base = _trials([1.0, 50.0, 1.0, 1.0, 1.0])
    other = _trials([0.5, 0.5, 0.5, 9.0, 0.5])
    assert compare_speeds(base, other).value == pytest.approx(2.0)
    assert median_speed(base) == pytest.approx(10.0)


def test_equal_rounds_have_no_spread_and_bounds_are_reproducible() -> None:
    base, other = _trials([1.0, 1.0]), _trials([0.5, 0.5])
    assert compare_speeds(base, other) == Spread(2.0, 2.0, 2.0)
    noisy = _trials([0.4, 0.5, 0.6], [0.2, 0.9, 0.7])
    base = _trials([1.0, 1.1, 1.0], [1.0, 1.0, 0.9])
    assert compare_speeds(base, noisy, seed=3) == compare_speeds(base, noisy, seed=3)
    spread = compare_speeds(base, noisy)
    assert spread.low < spread.value < spread.high


def test_bounds_cover_the_truth() -> None:
    """Of 200 experiments with a true ratio of 1, about 95 % must have it between their bounds."""
    import numpy as np

    rng = np.random.default_rng(1)
    covered = 0
    for number in range(200):
        seconds = np.exp(rng.normal(0, 0.2, (2, 8, 7)))
        base, other = (_trials(*one.tolist()) for one in seconds)
        spread = compare_speeds(base, other, seed=number, num_resamples=200)
        covered += spread.low <= 1 <= spread.high
    assert 180 <= covered <= 200


def test_answers_are_timed_by_their_decoding() -> None:
    toy = ToyModel(scripted_law(8, [1, 2, 3, 1, 2, 3, 1, 2], start=2), 8)
    loaded = LoadedModel(model=toy, tokenizer=None, chat_template=None, path=Path("toy"))
    params = SamplingParams(temperature=0, max_tokens=8)
    ways = {name: answer_with(LLM.from_loaded(loaded, drafter=name), params) for name in ("none", "ngram")}
    trials = Comparison(ways, num_rounds=2).run([[4, 5]])
    plain, drafted = (outputs_of(trials[name]) for name in ways)
    assert [list(one.outputs[0].token_ids) for one in plain + drafted] == [[1, 2, 3, 1, 2, 3, 1, 2]] * 4
    assert trials["none"][0][0].amount == 8
    assert drafted[0].speculation.num_steps < plain[0].speculation.num_steps == 8
    assert 0 < drafted[0].timing.draft_s < drafted[0].timing.decode_s == trials["ngram"][0][0].seconds
