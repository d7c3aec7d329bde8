"""The n-gram table against a plain dictionary, and its limits."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sakiyomi.errors import CheckpointError
from sakiyomi.lookup.table import CONTEXT_BYTES, NgramTable, TableCounter, hash_context

ORDER = 3
VOCAB = 40


def count(texts: list[list[int]], *, max_bytes: int = 10**9, min_count: int = 1) -> NgramTable:
    counter = TableCounter(ORDER, VOCAB)
    for text in texts:
        tokens = np.array(text)
        counter.add(tokens, np.append(tokens[1:], -1), np.ones(len(text), np.bool_))
    return counter.build(max_bytes, min_count)


def reference(texts: list[list[int]], text: list[int]) -> dict[int, float]:
    """What follows by interpolated absolute discounting of one half, over dictionaries."""
    followers: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for one in texts:
        for position in range(1, len(one)):
            for length in range(min(ORDER, position + 1)):
                followers[tuple(one[position - length : position])][one[position]] += 1
    probs: dict[int, float] = defaultdict(float)
    left = 1.0
    for length in range(min(ORDER - 1, len(text)), -1, -1):
        known = followers.get(tuple(text[len(text) - length :]))
        if known is None:
            continue
        total = known.total()
        for token, number in known.items():
            probs[token] += left * (number - 0.5) / total
        left *= 0.5 * len(known) / total
    return probs


# Too few tokens for an estimate of the discount, which is one half then.
TEXTS = [[1, 2, 3, 1, 2, 4, 1, 2, 3, 5], [7, 1, 2, 3, 9], [2]]


@pytest.mark.parametrize("text", [[], [1], [1, 2], [8, 1, 2], [2, 3], [30, 31], [30, 2]])
def test_it_says_what_counting_says(text: list[int]) -> None:
    table, expected = count(TEXTS), reference(TEXTS, text)
    found = table.continue_text(text)
    told = dict(zip(found.ids.tolist(), found.probs.tolist(), strict=True))
    # What says no more than the shorter context does is left to that one, and so moves a little probability.
    distance = sum(abs(told.get(token, 0.0) - expected.get(token, 0.0)) for token in {*told, *expected}) / 2
    assert distance < 0.06
    best = max(expected, key=expected.__getitem__)
    assert told[best] == pytest.approx(expected[best], rel=0.05)


@given(st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=60), min_size=1, max_size=6), st.data())
def test_what_it_says_is_nearly_a_law(texts: list[list[int]], data: st.DataObject) -> None:
    table = count(texts)
    context = data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=4))
    found = table.continue_text(context)
    assert (np.diff(found.ids) > 0).all()
    assert (found.probs > 0).all()
    assert found.probs.sum() <= 1.02
    same = NgramTable.from_tensors(ORDER, table.to_tensors()).continue_text(context)
    np.testing.assert_array_equal(same.probs, found.probs)


def test_contexts_do_not_reach_over_the_start_of_a_document() -> None:
    apart, together = count([[1, 2], [3, 4]]), count([[1, 2, 3, 4]])
    assert 3 in together.continue_text([2]).ids
    assert hash_context([2]) not in apart.keys


def test_labels_that_do_not_count_are_left_out() -> None:
    counter = TableCounter(2, VOCAB)
    counter.add(np.array([1, 2, 3]), np.array([5, 6, 7]), np.array([True, False, True]))
    table = counter.build(10**6, 1)
    assert sorted(set(table.tokens.tolist())) == [5, 7]


def test_the_cap_holds_and_the_most_useful_stays() -> None:
    rng = np.random.default_rng(0)
    texts = [[1, 2, 3, 4] * 50, rng.integers(5, VOCAB, 4000).tolist()]
    full, small = count(texts), count(texts, max_bytes=60)
    size = small.num_contexts * CONTEXT_BYTES + len(small) * 3
    assert size <= 60 < full.num_contexts * CONTEXT_BYTES + len(full) * 3
    for context, follower in (([1, 2], 3), ([2, 3], 4)):
        found = small.continue_text(context)
        assert found.ids[np.argmax(found.probs)] == follower


def test_large_vocabularies_fit() -> None:
    counter = TableCounter(2, 200_000)
    tokens = np.array([150_000, 199_999] * 3)
    counter.add(tokens, np.append(tokens[1:], -1), np.ones(len(tokens), np.bool_))
    found = counter.build(10**6, 1).continue_text([150_000])
    assert found.ids[np.argmax(found.probs)] == 199_999


def test_damaged_arrays_are_refused() -> None:
    tensors = count(TEXTS).to_tensors()
    for name in tensors:
        with pytest.raises(CheckpointError):
            NgramTable.from_tensors(ORDER, {**tensors, name: tensors[name][:-1]})
    with pytest.raises(CheckpointError):
        NgramTable.from_tensors(ORDER, {**tensors, "keys": tensors["keys"][::-1]})
    with pytest.raises(CheckpointError):
        NgramTable.from_tensors(ORDER, {"keys": tensors["keys"]})


def test_no_text_makes_a_table_that_says_nothing() -> None:
    table = TableCounter(ORDER, VOCAB).build(1000)
    assert len(table.continue_text([1, 2]).ids) == 0
