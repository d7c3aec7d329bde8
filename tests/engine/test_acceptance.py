"""Labels of drafted nodes, and what is made of them."""

from __future__ import annotations

import random

import pytest

from sakiyomi.engine.acceptance import FADE_SHARED, FIRST_OF_DEPTHS, Acceptance, Rates
from sakiyomi.tree import Draft


def _new() -> Acceptance:
    return Acceptance(Rates(FADE_SHARED))


def _tree(confidences: tuple[float, ...] | None) -> Draft:
    """Children 7 and 8 of the root, 9 below 7, 5 below 9."""
    return Draft((7, 8, 9, 5), (-1, -1, 0, 2), confidences=confidences)


def test_before_any_label_the_drafter_is_believed() -> None:
    survivals, kinds = _new().judge(_tree((0.6, 0.3, 0.3, 0.03)))
    assert survivals == pytest.approx([0.6, 0.3, 0.3, 0.03])
    assert len(set(kinds[:2])) == 2
    assert kinds[2] != kinds[0]  # depths 1 and beyond are told apart


def test_a_drafter_without_confidences_is_judged_by_depth_and_siblings_share() -> None:
    survivals, kinds = _new().judge(_tree(None))
    assert survivals == pytest.approx([0.3, 0.3, 0.18, 0.108])
    assert kinds == [FIRST_OF_DEPTHS, FIRST_OF_DEPTHS, FIRST_OF_DEPTHS + 1, FIRST_OF_DEPTHS + 2]


def test_confidences_are_corrected_by_what_came_true() -> None:
    """A drafter that claims 0.9 and is right half of the time, one that claims 0.2 and is always right."""
    acceptance = _new()
    rng = random.Random(3)
    for _ in range(300):
        bold, shy = Draft((1,), (-1,), confidences=(0.92,)), Draft((1,), (-1,), confidences=(0.2,))
        acceptance.learn(bold, acceptance.judge(bold)[1], (1 if rng.random() < 0.5 else 2, 3), 0)
        acceptance.learn(shy, acceptance.judge(shy)[1], (1, 3), 0)
    assert acceptance.judge(bold)[0][0] == pytest.approx(0.5, abs=0.15)
    assert acceptance.judge(shy)[0][0] > 0.9


def test_labels_reach_as_deep_as_the_text_tells() -> None:
    acceptance = _new()
    draft = _tree(None)
    _, kinds = acceptance.judge(draft)
    before = list(acceptance.conditionals(3))
    assert acceptance.learn(draft, kinds, (7, 4), 0) == 1  # right at depth 1, wrong at 2, nothing known of 3
    after = list(acceptance.conditionals(3))
    assert after[0] > before[0]
    assert after[1] < before[1]
    untouched = Rates(FADE_SHARED)
    assert untouched.rate(FIRST_OF_DEPTHS + 2, 0.5) == 0.5


def test_what_was_not_checked_is_labelled_too() -> None:
    acceptance = _new()
    draft = Draft((7,), (-1,), confidences=(0.5,))
    for _ in range(20):
        acceptance.learn(draft, acceptance.judge(draft)[1], (7,), 0)
    assert acceptance.judge(draft)[0][0] > 0.85


def test_a_sampled_draft_is_labelled_by_the_verdict_alone() -> None:
    """The token was refused, and the draw that followed gave it all the same."""
    acceptance = _new()
    draft = Draft((7,), (-1,), "independent")
    _, kinds = acceptance.judge(draft)
    before = list(acceptance.conditionals(1))[0]
    assert acceptance.learn(draft, kinds, (7,), 0) == 0
    assert list(acceptance.conditionals(1))[0] < before
    assert acceptance.learn(draft, kinds, (7, 3), 1) == 1


def test_a_draft_of_nothing_is_a_miss() -> None:
    acceptance = _new()
    before = list(acceptance.conditionals(1))[0]
    assert acceptance.learn(Draft.empty(), [], (7,), 0) == 0
    assert list(acceptance.conditionals(1))[0] < before


def test_a_new_sequence_starts_from_what_is_known_of_others() -> None:
    shared = Rates(FADE_SHARED)
    first = Acceptance(shared)
    draft = Draft((7,), (-1,))
    for _ in range(100):
        first.learn(draft, first.judge(draft)[1], (8,), 0)
    assert list(Acceptance(shared).conditionals(1))[0] < 0.15
