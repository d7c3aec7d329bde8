"""The automata against searches that are obviously right, and against each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sakiyomi.lookup import automaton as module
from sakiyomi.lookup.automaton import MAX_SCANNED, Automaton, PythonAutomaton, Tree, new_automaton

New = Callable[[int], Automaton]
FORMS: dict[str, New] = {"python": PythonAutomaton}
if module.SuffixAutomaton is not None:
    FORMS["native"] = module.SuffixAutomaton

both_forms = pytest.mark.parametrize("new", FORMS.values(), ids=FORMS.keys())
texts = st.integers(1, 5).flatmap(lambda size: st.lists(st.integers(0, size - 1), max_size=40))


def occurs(text: Seq[int], part: Seq[int]) -> list[int]:
    """Where `part` ends in `text`."""
    size = len(part)
    return [end for end in range(size, len(text) + 1) if list(text[end - size : end]) == list(part)]


def longest_suffix(text: Seq[int], other: Seq[int]) -> list[int]:
    """The longest suffix of `other` that lies in `text`."""
    return next(list(other[start:]) for start in range(len(other) + 1) if occurs(text, other[start:]))


def count_followers(text: Seq[int], part: Seq[int], max_count: int) -> dict[int, int]:
    counts = Counter(text[end] for end in occurs(text, part) if end < len(text))
    return {token: min(count, max_count) for token, count in counts.items()}


@both_forms
@given(text=texts, max_count=st.sampled_from([1, 2, 3, 255]))
def test_suffix_and_followers_equal_a_search_at_every_prefix(new: New, text: list[int], max_count: int) -> None:
    automaton = new(max_count)
    for end in range(len(text) + 1):
        prefix = text[:end]
        automaton.extend(text[end - 1 : end])
        state, length = automaton.match_suffix()
        suffix = prefix[end - length :]
        assert length < max(end, 1), "the text must not match itself"
        assert suffix == longest_suffix(prefix[:-1], prefix[1:])
        if length > 0:
            assert dict(automaton.followers(state)) == count_followers(prefix, suffix, max_count)
    assert len(automaton) == len(text)
    assert automaton.num_states <= max(2 * len(text) - 1, len(text) + 1)
    assert automaton.num_edges <= max(3 * len(text) - 4, 2 * len(text))


@both_forms
@given(text=texts, other=texts, chunk=st.integers(1, 7))
def test_matches_of_another_text_survive_growth(new: New, text: list[int], other: list[int], chunk: int) -> None:
    automaton = new(255)
    match = 0, 0
    for end in range(chunk, len(other) + chunk, chunk):
        automaton.extend(text[end - chunk : end])
        match = automaton.advance(*match, other[end - chunk : end])
        # A match is kept while the text grows, not looked for again, so it may be shorter than the longest.
        read = other[:end]
        longest = longest_suffix(text[:end], read)
        assert match[1] <= len(longest)
        suffix = read[len(read) - match[1] :]
        if match[1]:
            assert dict(automaton.followers(match[0])) == count_followers(text[:end], suffix, 255)
    fresh = automaton.advance(0, 0, other)
    assert fresh[1] == len(longest_suffix(text[: len(automaton)], other))


def grow_by_search(text: Seq[int], match: Seq[int], width: int, min_match: int, least: float, doubt: float) -> dict:
    """All nodes of a tree, found by searching: path -> confidence."""
    nodes: dict[tuple[int, ...], float] = {}

    def visit(path: tuple[int, ...], match: list[int], confidence: float) -> None:
        while match and not count_followers(text, match, 255):
            match = longest_suffix(text[:-1], match[1:])
        if len(match) < max(min_match, 1):
            return
        counts = count_followers(text, match, 255)
        last = {token: max(occurs(text, [*match, token])) for token in counts}
        weight = sum(counts.values()) + len(counts) * doubt / len(match)
        for token in sorted(counts, key=lambda token: (-counts[token], -last[token]))[:width]:
            believed = confidence * (counts[token] / weight)
            if believed >= least and len(path) < 6:
                nodes[*path, token] = believed
                visit((*path, token), [*match, token], believed)

    visit((), list(match), 1.0)
    return nodes


def to_paths(tree: Tree) -> dict[tuple[int, ...], float]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree[0], tree[1], strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert len(set(paths)) == len(paths)
    return dict(zip(paths, tree[2], strict=True))


@both_forms
@given(
    text=texts,
    width=st.integers(1, 3),
    min_match=st.integers(1, 3),
    least=st.sampled_from([0.02, 0.1, 0.3]),
    doubt=st.sampled_from([0.5, 2.3]),
    max_nodes=st.integers(0, 12),
)
def test_trees_equal_a_search(
    new: New, text: list[int], width: int, min_match: int, least: float, doubt: float, max_nodes: int
) -> None:
    automaton = new(255)
    automaton.extend(text)
    state, length = automaton.match_suffix()
    found = grow_by_search(text, text[len(text) - length :], width, min_match, least, doubt)
    whole = to_paths(automaton.grow_tree(state, length, 10**6, 6, width, min_match, least, doubt))
    assert whole == pytest.approx(found)
    confidences = list(whole.values())
    assert confidences == sorted(confidences, reverse=True)
    part = to_paths(automaton.grow_tree(state, length, max_nodes, 6, width, min_match, least, doubt))
    assert list(part.items()) == list(whole.items())[:max_nodes]


def test_a_period_goes_on_beyond_the_end_of_the_text() -> None:
    for new in FORMS.values():
        automaton = new(255)
        automaton.extend([1, 2, 3, 1, 2, 3, 1, 2, 3])
        assert automaton.grow_tree(*automaton.match_suffix(), 8, 8, 1, 1, 0.01, 0.5)[0] == (1, 2, 3, 1, 2, 3, 1, 2)


def test_the_more_frequent_follower_comes_first_then_the_later() -> None:
    for new in FORMS.values():
        automaton = new(255)
        automaton.extend([9, 1, 9, 2, 9, 2, 9, 3, 9])
        tokens, parents, _ = automaton.grow_tree(*automaton.match_suffix(), 3, 1, 3, 1, 0.01, 1.0)
        assert (tokens, parents) == ((2, 3, 1), (-1, -1, -1))


def test_the_end_of_a_text_is_not_guessed() -> None:
    for new in FORMS.values():
        automaton = new(255)
        automaton.extend([1, 2, -1, 1, 2, -1, 1, 2, 3])
        match = automaton.advance(0, 0, [1, 2])
        assert match[1] == 2
        assert automaton.grow_tree(*match, 8, 8, 3, 1, 0.01, 1.0)[0] == (3,)


both_texts = st.lists(st.integers(-1, 3), max_size=12)


@pytest.mark.skipif("native" not in FORMS, reason="the native extension was not built")
@given(data=st.data(), max_count=st.sampled_from([1, 2, 255]))
def test_the_two_forms_are_the_same(data: st.DataObject, max_count: int) -> None:
    forms = [new(max_count) for new in FORMS.values()]
    matches = [(0, 0)] * 2
    for _ in range(data.draw(st.integers(1, 12))):
        more, other = data.draw(both_texts), [abs(token) for token in data.draw(both_texts)]
        limits = tuple(data.draw(st.integers(low, 9)) for low in (0, 0, 1, 1))
        limits += (data.draw(st.sampled_from([0.0, 0.01, 0.3])), data.draw(st.sampled_from([0.5, 2.3])))
        for form in forms:
            form.extend(more)
        matches = [form.advance(*match, other) for form, match in zip(forms, matches, strict=True)]
        seen = [
            (
                match,
                form.match_suffix(),
                form.followers(match[0]),
                form.grow_tree(*match, *limits),
                form.grow_tree(*form.match_suffix(), *limits),
                (len(form), form.num_states, form.num_edges),
            )
            for form, match in zip(forms, matches, strict=True)
        ]
        assert seen[0] == seen[1]


def test_many_followers() -> None:
    """More followers than a list is searched for, and more than a tree looks at."""
    results = []
    for new in FORMS.values():
        automaton = new(255)
        for token in range(1, 3 * MAX_SCANNED):
            automaton.extend([0, token])
        automaton.extend([0])
        state, length = automaton.match_suffix()
        assert dict(automaton.followers(state)) == dict.fromkeys(range(1, 3 * MAX_SCANNED), 1)
        results.append(automaton.grow_tree(state, length, 4, 1, 4, 1, 1e-6, 1.0))
        assert results[-1][0] == tuple(range(3 * MAX_SCANNED - 1, 3 * MAX_SCANNED - 5, -1))
        assert results[-1][2][0] == pytest.approx(1 / (2 * MAX_SCANNED))
    assert all(result == results[0] for result in results)


@both_forms
def test_a_token_costs_little_even_in_a_text_of_one_token(new: New) -> None:
    """Updates are bounded by the largest count: without that bound this test takes minutes."""
    automaton = new(20)
    automaton.extend([7] * 50_000)
    state, length = automaton.match_suffix()
    assert length == 49_999
    assert automaton.followers(automaton.advance(0, 0, [7])[0]) == [(7, 20)]


def test_without_the_extension_the_reference_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SuffixAutomaton", None)
    assert isinstance(new_automaton(), PythonAutomaton)
