"""Rules that keep the distribution pass the test of laws; wrong ones do not; false alarms stay within their bound."""

from __future__ import annotations

import numpy as np
import pytest
from toys import PLAN, PROMPTS, drafting, make_target

from sakiyomi.assemble import make_verifier
from sakiyomi.params import SamplingParams
from sakiyomi.prove.controls import AcceptControl, RedrawControl, ShiftControl
from sakiyomi.prove.law import Bench, Context, LawResult, _label, find_contexts, thin
from sakiyomi.prove.memo import remember
from sakiyomi.types import Verifier

SETTINGS = (SamplingParams(temperature=1.0, max_tokens=None), SamplingParams(temperature=0.7, top_p=0.9))


def check(verifier: Verifier, width: int = 1, num_draws: int = PLAN.num_draws, seed: int = 1) -> LawResult:
    wrap, target = remember({}), make_target()
    drafter = drafting(target, verifier, width)(wrap)
    contexts = [Context("a", (1, 2, 3), 3, SETTINGS[0], 6), Context("b", (4, 5), 2, SETTINGS[1], 6)]
    return Bench(wrap(target.model), drafter, contexts).test(verifier, num_draws, seed, name="rule")


@pytest.mark.parametrize(("rule", "width"), [("rejection", 1), ("block", 1), ("tree", 2), ("traversal", 2)])
def test_a_correct_rule_passes(rule: str, width: int) -> None:
    result = check(make_verifier(rule), width)
    assert not result.is_rejected
    assert result.first_error is None
    assert result.num_draws == PLAN.num_draws
    assert 0 < result.num_accepted_tokens < result.num_draft_tokens
    assert 0 < result.least_deviation < 0.3
    assert 0 < result.least_tilt < 0.15
    assert sum(sum(one.counts) for one in result.prefixes if not one.prefix) == PLAN.num_draws
    assert any(one.prefix and sum(one.counts) for one in result.prefixes)


@pytest.mark.parametrize("control", [AcceptControl, RedrawControl, ShiftControl])
@pytest.mark.parametrize(("rule", "width"), [("rejection", 1), ("block", 1), ("tree", 2), ("traversal", 2)])
def test_a_wrong_rule_is_rejected(rule: str, width: int, control: type) -> None:
    assert check(control(make_verifier(rule)), width, num_draws=4000).is_rejected


def test_correct_rules_are_rarely_rejected() -> None:
    """By Ville's inequality the e-value reaches 20 in at most a twentieth of all runs."""
    highest = [check(make_verifier("rejection"), num_draws=60, seed=seed).log_e for seed in range(40)]
    assert np.mean(np.array(highest) >= np.log(20)) <= 0.05


def test_cells_cover_the_law() -> None:
    probs = np.array([0.5, 0.2, 0.1, *[0.002] * 100])
    labels = _label(probs)
    sums = np.bincount(labels, probs)
    assert (np.diff(labels) >= 0).all()
    assert sums.sum() == pytest.approx(1)
    assert sums.min() > 0.03
    assert _label(np.ones(1)).tolist() == [0]


def test_contexts_are_places_where_something_is_guessed() -> None:
    verifier = make_verifier("rejection")
    wrap, target = remember({}), make_target()
    drafter, model = drafting(target, verifier)(wrap), wrap(target.model)
    texts = [(prompt, [1, 2, 3, 4]) for prompt in PROMPTS]
    found = find_contexts(model, drafter, texts, lambda tokens, n: Context("", tokens, n, SETTINGS[0]), 4)
    assert len(found) == 4
    assert {context.num_prompt for context in found} == {3, 2, 4}


def test_a_thinned_curve_keeps_its_peaks_and_its_end() -> None:
    curve = [(i, float(i == 500)) for i in range(1, 1001)]
    thinned = thin(curve)
    assert len(thinned) < 200
    assert (500, 1.0) in thinned
    assert thinned[-1] == (1000, 0.0)
    assert thin([]) == ()
