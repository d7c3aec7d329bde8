"""Differences from plain decoding are found, and rounding is told from faults."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from toys import PROMPTS, VOCAB_SIZE, RoundingModel, make_target

from sakiyomi.assemble import make_verifier
from sakiyomi.drafters.none import NoneDrafter
from sakiyomi.drafters.planted import scatter, stray
from sakiyomi.models.toy import ToyModel
from sakiyomi.params import SamplingParams
from sakiyomi.prove.certificate import planted
from sakiyomi.prove.controls import CONTROLS, ShiftControl
from sakiyomi.prove.identity import (
    IdentityResult,
    Plain,
    Way,
    answer_plainly,
    change_of,
    compare,
    gap_of,
    measure_noise,
)
from sakiyomi.tree import Draft
from sakiyomi.types import History, Verifier

MATCH = make_verifier("match")
WARM = SamplingParams(temperature=1.0, seed=3, max_tokens=40)
GREEDY = SamplingParams(temperature=0.0, seed=3, max_tokens=40)


def trees(plains: list[Plain]) -> Way:
    truth = {plain.prompt: plain.tokens for plain in plains}
    return Way("trees", planted(scatter(truth, 12, VOCAB_SIZE)), batch=3, is_reversed=True)


def chains(plains: list[Plain]) -> Way:
    truth = {plain.prompt: plain.tokens for plain in plains}
    return Way("chains", planted(stray(truth, 5, VOCAB_SIZE)), batch=2, budget=4)


def check(
    model: ToyModel, params: SamplingParams, make_way: Callable[[list[Plain]], Way], verifier: Verifier = MATCH
) -> IdentityResult:
    plains = answer_plainly(model, PROMPTS, params)
    noise = None if model.info.is_bit_exact else measure_noise(model, plains)
    return compare(model, verifier, make_way(plains), plains, params, noise)


@pytest.mark.parametrize("params", [WARM, GREEDY])
@pytest.mark.parametrize("way", [trees, chains])
def test_match_is_identical_on_a_model_of_equal_bits(params: SamplingParams, way: Callable[..., Way]) -> None:
    result = check(make_target().model, params, way)
    assert result.finding == "identical"
    assert result.num_same_rows == result.num_rows == 3 * 40
    assert 0 < result.num_accepted_tokens < result.num_draft_tokens
    assert result.max_change == 0
    assert not result.differences


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("model", [make_target().model, RoundingModel(1e-6)])
def test_wrong_verifiers_are_faults(control: type, model: ToyModel) -> None:
    result = check(model, WARM, chains, control(MATCH))
    assert result.finding == "fault"
    assert result.differences[0].finding == "fault"


def test_rounding_is_told_from_faults() -> None:
    """Logits on a grid are often equal, so that noise far below any real gap flips tokens."""
    model = RoundingModel(2e-6)
    fine = model.law
    model.law = lambda tokens: np.round(fine(tokens) / 2) * 2
    result = check(model, GREEDY, trees)
    assert result.finding == "rounding"
    assert result.num_same_texts < 3
    for one in result.differences:
        assert one.finding == "rounding"
        assert one.token != one.plain_token
        assert 0 <= one.gap <= one.limit
        assert 0 < one.change <= one.limit


def test_the_same_tokens_from_rounded_rows_are_rounding() -> None:
    result = check(RoundingModel(1e-6), GREEDY, trees)
    assert (result.finding, result.num_same_texts, result.num_differences) == ("rounding", 3, 0)
    assert result.num_same_rows < result.num_rows
    assert 0 < result.max_change < 1e-5


def test_a_leaking_mask_is_a_fault_even_where_tokens_stay() -> None:
    result = check(RoundingModel(1e-6, fault=-0.01), GREEDY, trees)
    assert result.finding == "fault"
    assert any(one.token == one.plain_token for one in result.differences)
    assert all(one.change > one.limit for one in result.differences)


def test_noise_beyond_what_rounding_explains_is_a_fault() -> None:
    assert check(RoundingModel(0.05), GREEDY, trees).finding == "fault"


def test_a_model_that_breaks_its_promise_of_equal_bits_is_a_fault() -> None:
    model = RoundingModel(1e-6)
    plains = answer_plainly(model, PROMPTS, GREEDY)
    assert compare(model, MATCH, trees(plains), plains, GREEDY, None).finding == "fault"


def test_no_drafts_in_company() -> None:
    result = check(make_target().model, WARM, lambda plains: Way("none", NoneDrafter(), False, 3))
    assert (result.finding, result.num_draft_tokens) == ("identical", 0)


def test_what_ends_a_request_is_raised() -> None:
    class Broken(ShiftControl):
        def verify(self, draft: Draft, output, sequence):
            raise ArithmeticError("broken")

    with pytest.raises(ArithmeticError, match="broken"):
        check(make_target().model, WARM, trees, Broken(MATCH))


def test_changes_and_gaps() -> None:
    row = np.array([1.0, 3.0, 2.5, -np.inf], np.float32)
    assert change_of(row, row + np.float32(0.5)) == 0  # no gap has changed
    assert change_of(row, np.array([1.0, 3.25, 2.5, -np.inf], np.float32)) == pytest.approx(0.25)
    assert change_of(row, np.array([1.0, 3.0, 2.5, 0.0], np.float32)) == np.inf
    assert change_of(row, np.array([1.0, np.nan, 2.5, -np.inf], np.float32)) == np.inf
    assert gap_of(row, History([1], 1, GREEDY, 0)) == pytest.approx(0.5)
    assert gap_of(np.array([1.0, -np.inf], np.float32), History([1], 1, GREEDY, 0)) == np.inf
