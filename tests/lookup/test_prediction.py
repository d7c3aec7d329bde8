"""Following a prediction: how many rounds an answer takes that differs from it in known ways."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sakiyomi.lookup.prediction import PredictionReader

MIN_CONFIDENCE = 0.1
PREDICTION = [random.Random(5).randrange(300) for _ in range(600)]
"""Like text: some tokens return often, so that single tokens do not tell the place."""


def count_rounds(prediction: list[int], answer: list[int], num_tokens: int) -> tuple[int, int]:
    """Steps that the answer takes, and tokens drafted."""
    reader = PredictionReader(prediction)
    position = num_rounds = num_drafted = 0
    while position < len(answer):
        draft = reader.draft(min(num_tokens, len(answer) - position - 1), MIN_CONFIDENCE)
        draft.check(10**6)
        num_drafted += len(draft)
        start, node = position, -1
        while node is not None and position < len(answer):
            node = draft.child(node, answer[position])
            position += 1
        reader.read(answer[start:position])
        num_rounds += 1
    return num_rounds, num_drafted


@pytest.mark.parametrize("num_tokens", [1, 4, 10, 16])
@pytest.mark.parametrize("length", [1, 17, 600])
def test_an_exact_prediction_is_accepted_whole(num_tokens: int, length: int) -> None:
    rounds, _ = count_rounds(PREDICTION, PREDICTION[:length], num_tokens)
    assert rounds == -(-length // (num_tokens + 1))


Edit = Callable[[list[int], int, list[int]], list[int]]
EDITS: dict[str, tuple[Edit, int]] = {
    "one replaced": (lambda text, at, new: [*text[:at], new[0], *text[at + 1 :]], 2),
    "one put in": (lambda text, at, new: [*text[:at], new[0], *text[at:]], 2),
    "one left out": (lambda text, at, new: [*text[:at], *text[at + 1 :]], 2),
    "three replaced": (lambda text, at, new: [*text[:at], *new[:3], *text[at + 3 :]], 4),
    "five put in": (lambda text, at, new: [*text[:at], *new, *text[at:]], 7),
    "twenty left out": (lambda text, at, new: [*text[:at], *text[at + 20 :]], 4),
    "a hundred left out": (lambda text, at, new: [*text[:at], *text[at + 100 :]], 5),
    "the beginning moved to the end": (lambda text, at, new: [*text[at:], *text[:at]], 9),
}


@pytest.mark.parametrize(("edit", "most"), EDITS.values(), ids=EDITS.keys())
def test_an_edit_costs_a_few_rounds(edit: Edit, most: int) -> None:
    rng = random.Random(7)
    for _ in range(60):
        new = [rng.randrange(300, 400) for _ in range(5)]
        answer = edit(PREDICTION, rng.randrange(5, 450), new)
        rounds, _ = count_rounds(PREDICTION, answer, 10)
        assert rounds <= -(-len(answer) // 11) + most


def test_a_useless_prediction_soon_drafts_little() -> None:
    rng = random.Random(8)
    _, drafted = count_rounds(PREDICTION, [rng.randrange(300, 600) for _ in range(300)], 16)
    assert drafted <= 300


small = st.lists(st.integers(0, 2), max_size=30)


@given(prediction=small, answer=small, num_tokens=st.integers(0, 9))
def test_any_prediction_gives_valid_drafts(prediction: list[int], answer: list[int], num_tokens: int) -> None:
    reader = PredictionReader(prediction)
    for token in answer:
        draft = reader.draft(num_tokens, MIN_CONFIDENCE)
        draft.check(3)
        assert len(draft) <= num_tokens
        assert draft.confidences is not None
        assert all(MIN_CONFIDENCE <= confidence <= 1 for confidence in draft.confidences)
        reader.read([token])
