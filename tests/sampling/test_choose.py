"""The chooser: vLLM's formulas, the law of the choices, and C++ equal to the reference."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from sakiyomi.errors import ParameterError, SakiyomiError
from sakiyomi.noise import exact_exp, exact_log, gumbel
from sakiyomi.ops import native
from sakiyomi.params import SamplingParams
from sakiyomi.sampling import choose as module
from sakiyomi.sampling.choose import (
    choose,
    choose_reference,
    filter_scores,
    log_probs,
    process_logits,
    weigh,
    weigh_reference,
)
from sakiyomi.types import History

needs_native = pytest.mark.skipif(module._native is None, reason="the native extension is not built")
INF = math.inf


def row_of(*logits: float) -> np.ndarray:
    return np.array(logits, np.float32)


def history_of(tokens: Any = (), num_prompt: int = 0, seed: int = 0, path: Any = (), end_ids: Any = (), **params: Any):
    return History(tokens, num_prompt, SamplingParams(**params), seed, frozenset(end_ids), tuple(path))


def outcome(chooser: Any, logits: np.ndarray, history: History) -> int | str:
    try:
        return chooser(logits, history)
    except SakiyomiError as error:
        return str(error)


def kept_ids(logits: np.ndarray, **params: Any) -> list[int]:
    return np.flatnonzero(filter_scores(logits, SamplingParams(**params)) > -INF).tolist()


# ---------------------------------------------------------------------------------------------- C++ and reference


def random_rows(seed: int, count: int, sizes: Any) -> Iterator[tuple[np.ndarray, History]]:
    """Rows full of exact ties, with random parameters up to their extremes."""
    rng = np.random.default_rng(seed)

    def pick(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    def ids(limit: int, most: int) -> list[int]:
        return rng.integers(0, limit, rng.integers(0, most + 1)).tolist()

    for _ in range(count):
        size = sizes(rng)
        row = rng.normal(size=size) * pick(0.1, 1, 3, 10, 1000)
        step = pick(0, 0.25, 1, 3)
        row = (np.round(row / step) * step if step else row).astype(np.float32)
        if rng.random() < 0.1:
            row[rng.random(size) < 0.3] = -INF
        if rng.random() < 0.02:
            row[rng.random(size) < 0.3] = INF
        if rng.random() < 0.01:
            row[rng.integers(size)] = math.nan
        if rng.random() < 0.03:
            row = row.clip(-300, 300) * np.float32(1e36)
        if rng.random() < 0.03:
            row *= np.float32(1e-42)
        params: dict[str, Any] = {"temperature": pick(0, 1, 1.0, 1.0, 0.7, 1.5, 5.0, 1e-3, 1e-40, 1e-320, 1e6, 1e308)}
        if rng.random() < 0.5:
            params["top_k"] = int(pick(-1, 1, 2, 3, size, max(size - 1, 1), size + 5, rng.integers(1, size + 1)))
        if rng.random() < 0.6:
            params["top_p"] = pick(0.9, 0.5, 0.1, 0.99, 1 - 1e-9, 1 - 1e-12, 1 - 2**-53, 1e-300, 1 - rng.random())
        if rng.random() < 0.3:
            params["min_p"] = pick(0.0, 0.1, 1.0, 0.001, 1e-320, rng.random())
        if rng.random() < 0.2:
            params["repetition_penalty"] = pick(1.2, 0.5, 2.0, 1e-300, 1e300)
        if rng.random() < 0.2:
            params["frequency_penalty"] = pick(0.5, -2.0, 2.0)
        if rng.random() < 0.2:
            params["presence_penalty"] = pick(0.5, -2.0, 2.0)
        if rng.random() < 0.2:
            params["logit_bias"] = {token: rng.uniform(-100, 100) for token in ids(size, 3)}
        if rng.random() < 0.2:
            params |= {"min_tokens": int(rng.integers(0, 12)), "stop_token_ids": ids(size + 2, 2)}
        tokens = ids(size, 20)
        seed_of_row = int(rng.integers(0, 2**64, dtype=np.uint64))
        prompt = int(rng.integers(0, len(tokens) + 1))
        yield row, history_of(tokens, prompt, seed_of_row, ids(size, 3), ids(size + 2, 2), max_tokens=None, **params)


def small(rng: np.random.Generator) -> int:
    return int(rng.choice([rng.integers(1, 8), rng.integers(5, 200), rng.integers(60, 70), rng.integers(120, 700)]))


@needs_native
@pytest.mark.parametrize("seed", range(8))
def test_cpp_chooses_what_the_reference_chooses(seed: int):
    for row, history in random_rows(seed, 12500, small):
        assert outcome(choose, row, history) == outcome(choose_reference, row, history), (row.tolist(), history)


@needs_native
def test_cpp_chooses_what_the_reference_chooses_in_large_vocabularies():
    for row, history in random_rows(99, 400, lambda rng: int(rng.choice([49152, 49152, 5000, 32001]))):
        assert outcome(choose, row, history) == outcome(choose_reference, row, history), history.params


@needs_native
def test_laws_over_large_vocabularies_are_the_references():
    """Also where single precision cannot tell the end of the nucleus, which is where it is far down a flat law."""
    rng = np.random.default_rng(12)
    for row, history in random_rows(98, 120, lambda rng: int(rng.choice([49152, 5000, 32001]))):
        params = replace(history.params, temperature=rng.choice([1.0, 0.7, 3.0]), top_p=rng.choice([0.9, 0.5, 0.999]))
        plain = process_logits(row, history)
        if np.isnan(plain).any():
            continue
        ids, weights = weigh(row, replace(history, params=params))
        wanted_ids, wanted_weights = weigh_reference(plain, params)
        assert ids.tolist() == wanted_ids.tolist()
        assert weights.tobytes() == wanted_weights.tobytes()


@needs_native
@pytest.mark.skipif("SAKIYOMI_ISA" in os.environ, reason="already running on a forced instruction set")
@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
def test_every_instruction_set_chooses_alike(isa: str):
    if isa not in native.list_isas() or isa == native.NativeOps(threads=1).isa:
        pytest.skip(f"this machine has no {isa}, or it is this run's own")
    files = [Path(__file__), Path(__file__).parents[1] / "verify" / "test_rules.py"]
    names = "large_vocabularies or any_row or log_probs_equal or numpys"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", names, *map(str, files)],
        env={**os.environ, "SAKIYOMI_ISA": isa},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:]


@needs_native
@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, -0.0, 1.0, 1.5, -3.0, -50.0, 200.0, -INF, INF]), min_size=1, max_size=90),
    st.sampled_from([0.0, 0.01, 1.0, 30.0]),
    st.integers(0, 95),
    st.floats(0.0, 1.0, exclude_min=True),
    st.floats(0.0, 1.0),
    st.integers(0, 2**64 - 1),
)
def test_cpp_chooses_what_the_reference_chooses_on_any_row(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int
):
    history = history_of([0], seed=seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert outcome(choose, row_of(*logits), history) == outcome(choose_reference, row_of(*logits), history)


@needs_native
def test_cpp_log_probs_equal_the_reference(monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(5)
    cases = [
        (row, int(rng.integers(row.size)), int(rng.integers(0, 21)))
        for row, _ in itertools.chain(random_rows(3, 2000, small), random_rows(4, 10, lambda rng: 49152))
        if not np.isnan(row).any() and row.max() > -INF
    ]
    fast = [log_probs(*case) for case in cases]
    monkeypatch.setattr(module, "_native", None)
    assert fast == [log_probs(*case) for case in cases]


def test_choose_works_without_the_extension(monkeypatch: pytest.MonkeyPatch):
    rows = list(random_rows(6, 50, small))
    with_extension = [outcome(choose, *case) for case in rows]
    monkeypatch.setattr(module, "_native", None)
    assert [outcome(choose, *case) for case in rows] == with_extension


# ---------------------------------------------------------------------------------------------- filters, by definition


def slow_kept_ids(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[int]:
    """min_p, top_k and top_p on probabilities, one token after the other."""
    best = max(logits)
    weights = {token: math.exp((logit - best) / temperature) for token, logit in enumerate(logits) if logit > -INF}
    order = sorted(weights, key=lambda token: (-logits[token], token))
    order = [token for token in order if weights[token] >= min_p * max(weights.values())]
    if top_k > 0:
        order = order[:top_k]
    total = sum(weights[token] for token in order)
    kept: list[int] = []
    for token in order:
        kept.append(token)
        if top_p < 1 and sum(weights[token] for token in kept) >= top_p * total:
            break
    return sorted(kept)


def test_filters_are_their_definitions():
    rng = np.random.default_rng(11)
    for _ in range(3000):
        # Odd values keep rounding in either program from deciding at a border.
        logits = np.round(rng.normal(size=rng.integers(1, 40)) * 2, 1).astype(np.float32)
        chosen = (
            float(rng.uniform(0.2, 3)),
            int(rng.integers(0, 20)),
            float(1 - rng.random()),
            float(rng.random() ** 3),
        )
        names = ("temperature", "top_k", "top_p", "min_p")
        params = dict(zip(names, chosen, strict=True))
        assert kept_ids(logits, **params) == slow_kept_ids(logits.tolist(), *chosen), params


def test_temperature_divides():
    row = row_of(2.0, 1.0, -1.0)
    np.testing.assert_array_equal(filter_scores(row, SamplingParams(temperature=0.5)), [0.0, -2.0, -6.0])


def test_top_k_keeps_exactly_k_with_the_lowest_ids_at_a_border_of_ties():
    row = row_of(1, 2, 1, 3, 1)
    assert kept_ids(row, top_k=3) == [0, 1, 3]
    assert kept_ids(row, top_k=4) == [0, 1, 2, 3]
    assert kept_ids(row, top_k=0) == kept_ids(row, top_k=-1) == kept_ids(row, top_k=9) == [0, 1, 2, 3, 4]


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    row = np.log(np.array([0.1, 0.4, 0.2, 0.3])).astype(np.float32)
    assert kept_ids(row, top_p=0.39) == [1]
    assert kept_ids(row, top_p=0.41) == kept_ids(row, top_p=0.69) == [1, 3]
    assert kept_ids(row, top_p=0.71) == [1, 2, 3]
    assert kept_ids(row, top_p=1e-9) == [1]
    assert kept_ids(row, top_p=0.91) == [0, 1, 2, 3]


def test_top_p_looks_at_the_law_that_top_k_left():
    row = np.log(np.array([0.4, 0.3, 0.2, 0.1])).astype(np.float32)
    assert kept_ids(row, top_p=0.55) == [0, 1]
    assert kept_ids(row, top_k=2, top_p=0.55) == [0]  # .4 of .7 is .571


def test_min_p_is_relative_to_the_most_probable():
    row = np.log(np.array([0.5, 0.26, 0.24])).astype(np.float32)
    assert kept_ids(row, min_p=0.5) == [0, 1]
    assert kept_ids(row, min_p=0.45) == [0, 1, 2]
    assert kept_ids(row_of(1, 1, 0.999), min_p=1.0) == [0, 1]


# ---------------------------------------------------------------------------------------------- penalties and bans


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits():
    row = row_of(3.0, -3.0, 3.0, -3.0, 3.0)
    history = history_of([0, 1, 1, 2], 2, path=[3], repetition_penalty=1.5)
    np.testing.assert_array_equal(process_logits(row, history), row_of(2.0, -4.5, 2.0, -4.5, 3.0))


def test_frequency_penalty_counts_answer_and_path_but_not_the_prompt():
    history = history_of([0, 1, 1, 2], 1, path=[1, 3], frequency_penalty=0.5)
    np.testing.assert_array_equal(process_logits(row_of(1, 1, 1, 1, 1), history), row_of(1, -0.5, 0.5, 0.5, 1))


def test_presence_penalty_acts_once():
    history = history_of([0, 1, 1, 2], 1, path=[1, 3], presence_penalty=0.5)
    np.testing.assert_array_equal(process_logits(row_of(1, 1, 1, 1, 1), history), row_of(1, 0.5, 0.5, 0.5, 1))


def test_the_order_is_bias_repetition_frequency_presence():
    params = {"logit_bias": {1: 3.0}, "repetition_penalty": 2.0, "frequency_penalty": 0.25, "presence_penalty": 0.5}
    history = history_of([0, 1, 1], 1, **params)
    np.testing.assert_array_equal(process_logits(row_of(4, 1, 1), history), row_of(2.0, 4 / 2 - 0.5 - 0.5, 1))


def test_processing_is_vllms_formula_on_random_rows():
    for row, history in random_rows(8, 2000, lambda rng: int(rng.integers(2, 40))):
        params = history.params
        if not 1e-3 < params.repetition_penalty < 1e3:
            continue
        wanted = row.copy()
        sequence = [*history.tokens, *history.path]
        if len(sequence) - history.num_prompt < params.min_tokens:
            for token in {*history.end_ids, *(params.stop_token_ids or ())}:
                if token < row.size:
                    wanted[token] = -INF
        for token, bias in (params.logit_bias or {}).items():
            wanted[token] += np.float32(bias)
        for token in set(sequence):
            penalty = np.float32(params.repetition_penalty)
            with np.errstate(over="ignore"):
                wanted[token] = wanted[token] / penalty if wanted[token] > 0 else wanted[token] * penalty
        for token, count in Counter(sequence[history.num_prompt :]).items():
            wanted[token] -= np.float32(params.frequency_penalty) * np.float32(count)
            wanted[token] -= np.float32(params.presence_penalty)
        before = row.copy()
        np.testing.assert_array_equal(process_logits(row, history), wanted)
        np.testing.assert_array_equal(row, before)


def test_min_tokens_forbids_end_and_stop_ids_until_enough_are_there():
    row = row_of(0, 5, 4, 3)
    for num_new in range(4):
        for num_path in range(num_new + 1):
            tokens, path = [3, 3] + [0] * (num_new - num_path), [0] * num_path
            history = history_of(tokens, 2, path=path, end_ids=[1], min_tokens=2, stop_token_ids=[2], temperature=0)
            assert choose(row, history) == (3 if num_new < 2 else 1)


def test_logit_bias_outside_the_vocabulary_is_refused():
    with pytest.raises(ParameterError, match=r"logit_bias names id 4; .* 0 to 3"):
        choose(row_of(0, 1, 2, 3), history_of([0], logit_bias={4: 1.0}))


def test_a_bias_of_minus_100_and_a_min_p_forbid_the_favourite():
    row = row_of(5, 4.9, 0)
    for seed in range(50):
        assert choose(row, history_of([1], seed=seed, logit_bias={0: -100.0}, min_p=0.3)) == 1


def test_a_penalty_over_a_long_history_counts_right():
    tokens = np.random.default_rng(3).integers(0, 50, 20000).tolist()
    counts = np.bincount(tokens[100:], minlength=60).astype(np.float32)
    found = process_logits(np.zeros(60, np.float32), history_of(tokens, 100, frequency_penalty=0.01))
    np.testing.assert_array_equal(found, -np.float32(0.01) * counts)


# ---------------------------------------------------------------------------------------------- the choice


def test_temperature_zero_takes_the_lowest_id_among_the_largest():
    assert choose(row_of(1, 3, 3, 2), history_of([0], temperature=0)) == 1
    assert choose(row_of(-INF, -7, -INF), history_of([0], temperature=0)) == 1
    assert choose(row_of(1, INF, INF), history_of([0], temperature=0)) == 1
    row = np.zeros(49152, np.float32)
    row[[40000, 49151]] = 1
    assert choose(row, history_of([0], temperature=0)) == 40000


def test_top_k_one_is_greedy():
    for row, _ in random_rows(31, 200, small):
        if not np.isnan(row).any() and row.max() > -INF:
            assert choose(row, history_of([0], top_k=1)) == int(np.argmax(row))


def test_the_choice_is_the_gumbel_max_rule():
    row = np.random.default_rng(1).normal(size=300).astype(np.float32)
    for seed in range(100):
        history = history_of([5, 6], seed=seed, path=[7], temperature=0.8)
        noisy = (row.astype(np.float64) - row.max()) / 0.8 + gumbel(seed, 3, np.arange(300))
        assert choose(row, history) == int(np.argmax(noisy))


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.6}, {"temperature": 1.7}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.2}],
    ids=str,
)
def test_choices_follow_the_filtered_softmax(params: dict[str, Any]):
    row = (np.random.default_rng(4).normal(size=30) * 2).astype(np.float32)
    weights = np.exp(filter_scores(row, SamplingParams(**params)))
    law = weights / weights.sum()
    draws = 20000
    counts = np.zeros(30)
    for i in range(draws):  # over seeds and over positions
        seed, position = (i, 0) if i % 2 else (3, i)
        counts[choose(row, History(range(position), 0, SamplingParams(**params), seed))] += 1
    assert counts[law == 0].sum() == 0
    often = law * draws >= 5
    expected = np.append(law[often], law[~often].sum()) * draws
    seen = np.append(counts[often], counts[~often].sum())
    assert stats.chisquare(seen[expected > 0], expected[expected > 0]).pvalue > 1e-4


def test_minus_infinity_is_never_chosen():
    row = row_of(-INF, 0, -INF, 0)
    assert {choose(row, history_of([0], seed=seed, temperature=1e6)) for seed in range(100)} == {1, 3}


def test_plus_infinity_takes_all():
    row = row_of(INF, 1e38, -INF, INF)
    assert {choose(row, history_of([0], seed=seed)) for seed in range(100)} == {0, 3}


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("size", [4, 64, 1000])
def test_nan_is_an_error_wherever_it_stands(temperature: float, size: int):
    for place in {0, size // 2, size - 1}:
        row = np.zeros(size, np.float32)
        row[place] = math.nan
        with pytest.raises(SakiyomiError, match="position 1 hold nan"):
            choose(row, history_of([0], temperature=temperature))
        with pytest.raises(SakiyomiError, match="nan"):
            log_probs(row, 0, 1)


@pytest.mark.parametrize("temperature", [0, 1])
def test_an_empty_choice_is_an_error(temperature: float):
    with pytest.raises(SakiyomiError, match=r"no token can be chosen at position 2: .* -inf"):
        choose(row_of(-INF, -INF), history_of([0, 0], temperature=temperature))
    history = history_of([0], end_ids=[0, 1], min_tokens=3, temperature=temperature)
    with pytest.raises(SakiyomiError, match="no token"):
        choose(row_of(1, 1), history)


# ---------------------------------------------------------------------------------------------- keys


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 19), min_size=1, max_size=12), st.integers(0, 12), st.integers(0, 2**64 - 1))
def test_drafted_and_committed_tokens_count_alike(tokens: list[int], cut: int, seed: int):
    row = np.random.default_rng(seed % 1000).normal(size=20).astype(np.float32)
    cut = min(cut, len(tokens))
    params = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2, "min_tokens": 5}
    for num_prompt in {0, min(2, cut)}:
        committed = history_of(tokens, num_prompt, seed, end_ids=[3], **params)
        drafted = history_of(tokens[:cut], num_prompt, seed, tokens[cut:], end_ids=[3], **params)
        assert choose(row, committed) == choose(row, drafted)
        np.testing.assert_array_equal(process_logits(row, committed), process_logits(row, drafted))


def test_the_choice_depends_on_seed_and_position_only():
    row = np.zeros(1000, np.float32)
    here = choose(row, history_of([1, 2, 3], seed=4))
    assert here == choose(row, history_of([9, 9, 9], 2, seed=4))
    others = {choose(row, history_of([1] * n, seed=seed)) for n in range(10) for seed in range(10)}
    assert len(others) > 80


@pytest.mark.parametrize("spread", [0.5, 2.0])
def test_coupled_draws_agree_at_least_as_often_as_the_bound_says(spread: float):
    """Draft and target with the same noise: P(equal) >= (1 - TV) / (1 + TV) (Daliri, Musco, Suresh, 2024)."""
    rng = np.random.default_rng(17)
    for _ in range(3):
        target = rng.normal(size=50).astype(np.float32) * 2
        draft = target + (rng.normal(size=50) * spread).astype(np.float32)
        p, q = (np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum() for x in (target, draft))
        distance = 0.5 * np.abs(p - q).sum()
        draws = 4000
        equal = sum(
            choose(target, history_of([0], seed=seed)) == choose(draft, history_of([1], seed=seed))
            for seed in range(draws)
        )
        exact = sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in range(50))
        deviation = 4.5 * math.sqrt(0.25 / draws)
        assert abs(equal / draws - exact) < deviation
        assert (1 - distance) / (1 + distance) - deviation <= equal / draws <= 1 - distance + deviation


# ---------------------------------------------------------------------------------------------- log-probabilities


def test_log_probs_are_the_raw_log_softmax():
    row = (np.random.default_rng(9).normal(size=500) * 3).astype(np.float32)
    wanted = row.astype(np.float64) - np.logaddexp.reduce(row.astype(np.float64))
    chosen, rank, best = log_probs(row, 123, 5)
    assert rank == np.count_nonzero(row >= row[123])
    assert chosen == pytest.approx(wanted[123], abs=1e-13)
    assert [token for token, _ in best] == np.argsort(-row, kind="stable")[:5].tolist()
    np.testing.assert_allclose([value for _, value in best], wanted[[token for token, _ in best]], atol=1e-13)


def test_log_probs_order_ties_by_id_and_leave_out_the_impossible():
    row = row_of(1, -INF, 2, 1, 2)
    assert [token for token, _ in log_probs(row, 0, 20).top] == [2, 4, 0, 3]
    assert log_probs(row, 1, 0) == (-INF, 5, [])
    assert [token for token, _ in log_probs(row, 1, 3).top] == [2, 4, 0]


def test_log_probs_of_infinite_logits():
    chosen, _, best = log_probs(row_of(INF, 3, INF), 0, 3)
    assert chosen == pytest.approx(-math.log(2), abs=1e-15)
    assert [token for token, _ in best] == [0, 2]
    assert log_probs(row_of(INF, 3, INF), 1, 0)[0] == -INF


def test_log_probs_refuse_an_unknown_token_and_an_empty_law():
    with pytest.raises(ParameterError, match="token 3 is not in the vocabulary; ids are 0 to 1"):
        log_probs(row_of(0, 1), 3, 1)
    with pytest.raises(SakiyomiError, match="largest logit is -inf"):
        log_probs(row_of(-INF, -INF), 0, 1)


def test_log_probs_use_the_own_exp_and_log():
    row = row_of(0.0, -1.0)
    assert log_probs(row, 0, 0)[0] == -float(exact_log(exact_exp(-1.0) + 1.0))
