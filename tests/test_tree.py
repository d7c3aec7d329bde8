"""Draft: growing, walking, cutting and checking trees, against brute force."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sakiyomi.errors import ParameterError
from sakiyomi.tree import DEFAULT_CONFIDENCE, ROOT, Draft, TreeBuilder, expected_length, merge_drafts

VOCAB = 6
UNIFORM = np.full(VOCAB, 1 / VOCAB)
paths = st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=6).map(tuple), max_size=12)


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    """Any valid tree, also in orders that from_paths never makes."""
    tokens: list[int] = []
    parents: list[int] = []
    for node in range(draw(st.integers(0, 14))):
        parent = draw(st.integers(-1, node - 1))
        free = sorted(set(range(VOCAB)) - {t for t, p in zip(tokens, parents, strict=True) if p == parent})
        if not free:
            break
        tokens.append(draw(st.sampled_from(free)))
        parents.append(parent)
    return Draft(tuple(tokens), tuple(parents))


def token_paths(draft: Draft) -> set[tuple[int, ...]]:
    """The token string of each node, found by walking up one parent at a time."""
    found = set()
    for node in range(len(draft)):
        string: list[int] = []
        while node != ROOT:
            string.insert(0, draft.tokens[node])
            node = draft.parents[node]
        found.add(tuple(string))
    return found


def prefixes(strings: list[tuple[int, ...]]) -> set[tuple[int, ...]]:
    return {string[:length] for string in strings for length in range(1, len(string) + 1)}


# ---------------------------------------------------------------------------------------------- making


def test_empty_and_chain():
    assert len(Draft.empty()) == 0
    chain = Draft.chain(iter([5, 5, 7]), "coupled")
    assert (chain.tokens, chain.parents, chain.drawn) == ((5, 5, 7), (-1, 0, 1), "coupled")
    assert chain.depths == (1, 2, 3)
    assert Draft.chain([]) == Draft.empty()


@given(paths)
def test_from_paths_holds_each_prefix_once(strings: list[tuple[int, ...]]):
    draft = Draft.from_paths(strings)
    draft.check(VOCAB)
    assert token_paths(draft) == prefixes(strings)
    assert len(draft) == len(prefixes(strings))


@given(st.lists(st.integers(0, VOCAB - 1), max_size=8))
def test_one_path_is_a_chain(string: list[int]):
    assert Draft.from_paths([string]) == Draft.chain(string)


# ---------------------------------------------------------------------------------------------- walking


@given(drafts())
def test_path_ancestors_and_depths_are_parents_of_parents(draft: Draft):
    for node, (path, depth) in enumerate(zip(draft.ancestors(), draft.depths, strict=True)):
        assert path == draft.path(node)
        assert path[-1] == node
        assert depth == len(path)
        assert [draft.parents[step] for step in path] == [ROOT, *path[:-1]]
    assert draft.path(ROOT) == ()


@given(drafts())
def test_child_is_the_one_with_that_parent_and_token(draft: Draft):
    for node in range(-1, len(draft)):
        for token in range(-1, VOCAB + 1):
            children = [i for i in range(len(draft)) if draft.parents[i] == node and draft.tokens[i] == token]
            assert draft.child(node, token) == (children[0] if children else None)


# ---------------------------------------------------------------------------------------------- cutting


@given(drafts(), st.integers(-1, 16), st.integers(0, 16))
def test_trim_keeps_the_first_shallow_nodes_as_a_tree(draft: Draft, max_nodes: int, max_depth: int):
    trimmed = draft.trim(max_nodes, max_depth)
    trimmed.check(VOCAB)
    shallow = [node for node in range(len(draft)) if len(draft.path(node)) <= max_depth][: max(max_nodes, 0)]
    assert trimmed.tokens == tuple(draft.tokens[node] for node in shallow)
    strings = [tuple(draft.tokens[step] for step in draft.path(node)) for node in shallow]
    assert [tuple(trimmed.tokens[step] for step in path) for path in trimmed.ancestors()] == strings
    assert prefixes(strings) == set(strings)
    assert trimmed.trim(max_nodes, max_depth) == trimmed


def test_trim_carries_the_rest_of_the_draft():
    draft = Draft((1, 2, 3, 0), (-1, 0, 1, -1), "independent", ["a", "b", "c", "d"])
    trimmed = draft.trim(9, 2)
    assert (trimmed.tokens, trimmed.parents) == ((1, 2, 0), (-1, 0, -1))
    assert (trimmed.drawn, trimmed.probs) == ("independent", ["a", "b", "d"])
    assert draft.trim(4, 3) is draft


# ---------------------------------------------------------------------------------------------- checking


@given(drafts())
def test_check_takes_every_valid_tree(draft: Draft):
    draft.check(VOCAB)


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ((1, 2), (-1,), "a draft has 2 tokens but 1 parents."),
        ((1, 6), (-1, 0), "draft node 1 holds id 6; ids are 0 to 5."),
        ((-1,), (-1,), "draft node 0 holds id -1; ids are 0 to 5."),
        ((1, 2), (1, -1), "draft node 0 has parent 1; a parent comes before its children."),
        ((1, 2), (-1, 1), "draft node 1 has parent 1; a parent comes before its children."),
        ((1, 2), (-1, -2), "draft node 1 has parent -2; a parent comes before its children."),
        ((1, 2, 2), (-1, 0, 0), "a draft has two siblings with the same token; siblings must differ."),
        ((3, 3), (-1, -1), "a draft has two siblings with the same token; siblings must differ."),
    ],
)
def test_check_names_each_defect(tokens: tuple[int, ...], parents: tuple[int, ...], message: str):
    with pytest.raises(ParameterError, match=re.escape(message)):
        Draft(tokens, parents).check(VOCAB)


@given(drafts(), st.data())
def test_check_finds_a_planted_defect(draft: Draft, data: st.DataObject):
    if not len(draft):
        return
    node = data.draw(st.integers(0, len(draft) - 1))
    tokens, parents = list(draft.tokens), list(draft.parents)
    defect = data.draw(st.sampled_from(["id", "parent", "sibling", "length"]))
    if defect == "id":
        tokens[node] = data.draw(st.sampled_from([-1, VOCAB, 10**9]))
    elif defect == "parent":
        parents[node] = data.draw(st.integers(node, node + 3) | st.integers(-5, -2))
    elif defect == "sibling":
        tokens.append(tokens[node])
        parents.append(parents[node])
    else:
        parents.pop()
    with pytest.raises(ParameterError):
        Draft(tuple(tokens), tuple(parents)).check(VOCAB)


# ---------------------------------------------------------------------------------------------- merging


@st.composite
def confident_drafts(draw: st.DrawFn) -> Draft:
    """Any valid tree, with confidences that fall along each path (ties included) or with none."""
    draft = draw(drafts())
    if draw(st.booleans()):
        return draft
    confidences: list[float] = []
    for parent in draft.parents:
        above = 1.0 if parent == ROOT else confidences[parent]
        confidences.append(above * draw(st.sampled_from([1.0, 0.7, 0.3])))
    return Draft(draft.tokens, draft.parents, confidences=tuple(confidences))


def confidence_of(draft: Draft) -> dict[tuple[int, ...], float]:
    """Each path of tokens with its confidence."""
    found = {}
    for node in range(len(draft)):
        path = tuple(draft.tokens[ancestor] for ancestor in draft.path(node))
        found[path] = DEFAULT_CONFIDENCE ** len(path) if draft.confidences is None else draft.confidences[node]
    return found


@given(several=st.lists(confident_drafts(), max_size=4), max_nodes=st.integers(0, 20))
def test_merging_keeps_the_most_confident_nodes_of_all(several: list[Draft], max_nodes: int) -> None:
    merged = merge_drafts(several, max_nodes)
    merged.check(VOCAB)
    best: dict[tuple[int, ...], float] = {}
    for draft in several:
        for path, confidence in confidence_of(draft).items():
            best[path] = max(best.get(path, 0.0), confidence)
    kept = confidence_of(merged)
    assert len(kept) == min(max_nodes, len(best))
    assert all(best[path] == confidence for path, confidence in kept.items())
    assert list(kept.values()) == sorted(best.values(), reverse=True)[:max_nodes]
    assert expected_length(merged) == pytest.approx(sum(kept.values()))


def test_a_child_is_never_more_confident_than_its_parent_after_merging() -> None:
    merged = merge_drafts([Draft((1, 2), (-1, 0), confidences=(0.2, 0.9))], 8)
    assert merged == Draft((1, 2), (-1, 0), confidences=(0.2, 0.2))


def test_merging_with_a_coupled_draft_is_coupled() -> None:
    assert merge_drafts([Draft.chain([1]), Draft.chain([2], "coupled")], 8).drawn == "coupled"
    assert merge_drafts([Draft.chain([1]), Draft.chain([2])], 8).drawn == "fixed"
    with pytest.raises(AssertionError, match="sampled"):
        merge_drafts([Draft((1,), (-1,), "independent")], 8)


@given(draft=confident_drafts(), max_nodes=st.integers(0, 10), max_depth=st.integers(0, 5))
def test_trimming_keeps_confidences_with_their_nodes(draft: Draft, max_nodes: int, max_depth: int) -> None:
    trimmed = draft.trim(max_nodes, max_depth)
    whole = confidence_of(draft)
    assert all(whole[path] == confidence for path, confidence in confidence_of(trimmed).items())


def test_confidences_are_as_many_as_nodes() -> None:
    with pytest.raises(ParameterError, match="confidences"):
        Draft((1, 2), (-1, 0), confidences=(0.5,)).check(VOCAB)


# ---------------------------------------------------------------------------------------------- laws and growth


def sampled(tokens: tuple[int, ...], parents: tuple[int, ...], draws: tuple[int, ...] | None = None) -> Draft:
    return Draft(tokens, parents, "independent", [UNIFORM] * len(tokens), None, draws)


def test_trimming_stops_before_a_draw_whatever_it_drew() -> None:
    """Three draws, the third once new and once a repetition: a budget of two leaves the first two of either."""
    new = sampled((1, 2, 3), (-1, -1, -1), (0, 1, 2)).trim(2, 9)
    again = sampled((1, 2), (-1, -1), (0, 1, 0)).trim(2, 9)
    assert new == again == sampled((1, 2), (-1, -1), (0, 1))
    assert len(new.probs or ()) == 2


def test_trimming_renumbers_draws_and_laws() -> None:
    laws = [np.array([0.5, 0.5]) for _ in range(4)]
    ids = [np.array([token, token + 1]) for token in (1, 2, 3, 4)]
    draft = Draft((1, 2, 3, 4), (-1, 0, -1, 2), "independent", laws, ids, (2, 0, 2, 1, 3))
    cut = draft.trim(9, 1)
    assert (cut.tokens, cut.parents, cut.draws) == ((1, 3), (-1, -1), (1, 0, 1))
    assert [law is own for law, own in zip(cut.probs or (), (laws[0], laws[2]), strict=True)] == [True, True]
    assert [list(row) for row in cut.probs_ids or ()] == [[1, 2], [3, 4]]
    assert list(draft.draws_below(ROOT)) == [2, 0, 2]
    assert list(draft.draws_below(1)) == []


@pytest.mark.parametrize(
    ("draft", "told"),
    [
        (Draft((1,), (-1,), "independent"), "as many laws"),
        (Draft((1,), (-1,), "independent", [UNIFORM[:3]]), "shape"),
        (Draft((1,), (-1,), "independent", [UNIFORM * 0.9]), "sum to 1"),
        (Draft((1,), (-1,), "independent", [np.full(VOCAB, np.nan)]), "sum to 1"),
        (Draft((1,), (-1,), "independent", [np.array([1.5, -0.5, 0, 0, 0, 0])]), "at least 0"),
        (Draft((1,), (-1,), "independent", [np.eye(VOCAB)[2]]), "probability 0"),
        (Draft((1,), (-1,), "independent", [np.ones(1)], [np.array([2])]), "probability 0"),
        (Draft((3,), (-1,), "independent", [np.ones(1)], [np.array([2])]), "probability 0"),
        (Draft((2,), (-1,), "independent", [np.ones(2) / 2], [np.array([2, 1])]), "ascending"),
        (Draft((2,), (-1,), "independent", [np.ones(2) / 2], [np.array([2, VOCAB])]), "ascending"),
        (Draft((2,), (-1,), "independent", [np.ones(1)], []), "probs_ids"),
        (sampled((1, 2), (-1, -1), (0,)), "name each"),
        (sampled((1, 2), (-1, -1), (0, 1, 2)), "name each"),
    ],
)
def test_malformed_laws_are_refused(draft: Draft, told: str) -> None:
    with pytest.raises(ParameterError, match=told):
        draft.check(VOCAB)


def test_good_laws_pass() -> None:
    sampled((1, 2), (-1, -1), (0, 1, 0)).check(VOCAB)
    Draft((2,), (-1,), "without_replacement", [np.ones(2) / 2], [np.array([1, 2])]).check(VOCAB)


def test_following() -> None:
    draft = Draft((1, 2, 3), (-1, -1, 1))
    assert draft.follow(lambda node, tokens: 2 + len(tokens)) == ((1, 2), (2, 3, 4))
    assert draft.follow(lambda node, tokens: 9) == ((), (9,))
    assert [Draft.chain([1, 2]).is_chain, Draft.empty().is_chain, draft.is_chain] == [True, True, False]


# A confidence of 1 (its logarithm 0) makes a child tie with its parent.
confidences = st.sampled_from([0.0, -0.1, -0.5, -2.0])


@st.composite
def builders(draw: st.DrawFn) -> TreeBuilder:
    tree = TreeBuilder()
    for _ in range(draw(st.integers(1, 8))):
        parent = draw(st.integers(-1, len(tree) - 1))
        if parent not in tree.parents:
            count = draw(st.integers(1, 3))
            tree.add(parent, range(count), [draw(confidences) for _ in range(count)])
    return tree


@given(tree=builders(), max_nodes=st.integers(0, 12))
def test_the_most_confident_nodes_are_a_tree(tree: TreeBuilder, max_nodes: int) -> None:
    nodes = tree.select(max_nodes)
    assert len(nodes) == min(max_nodes, len(tree))
    assert all(tree.parents[node] in (ROOT, *nodes) for node in nodes)
    left_out = set(range(len(tree))) - set(nodes)
    assert all(tree.confidences[a] <= tree.confidences[b] for a in left_out for b in nodes)
    draft = tree.build(nodes)
    draft.check(VOCAB)
    assert [draft.depths[new] for new in range(len(draft))] == [tree.depths[node] for node in nodes]
    assert [tree.path_tokens(node) for node in nodes] == [
        tuple(draft.tokens[a] for a in draft.path(new)) for new in range(len(draft))
    ]


def test_the_frontier_is_the_deepest_level_at_its_most_confident() -> None:
    tree = TreeBuilder()
    assert tree.frontier(2) == []
    tree.add(ROOT, [1, 2, 3], [-1.0, -0.1, -0.5])
    assert tree.frontier(2) == [1, 2]
    tree.add(1, [4, 5], [-3.0, -0.2])
    tree.add(2, [4, 5], [-0.3, -0.3])
    assert tree.frontier(2) == [4, 5]
    assert tree.frontier(9, frozenset({5})) == [3, 5]
    assert tree.confidences[3] == pytest.approx(-3.1)


def test_the_best_chain_is_the_path_that_is_expected_to_be_accepted_longest() -> None:
    draft = Draft.from_paths([[1, 2], [3, 4, 5], [3, 6]])
    assert draft.best_chain() == Draft.chain([3, 4, 5])
    sure = Draft((1, 3, 2, 4), (-1, -1, 0, 1), confidences=(0.9, 0.5, 0.8, 0.4))
    assert sure.best_chain() == Draft((1, 2), (-1, 0), confidences=(0.9, 0.8))
    chain = Draft.chain([1, 2])
    assert chain.best_chain() is chain
    assert len(Draft.empty().best_chain()) == 0


def test_the_best_chain_of_a_sampled_draft_is_that_of_the_first_draws() -> None:
    laws = [np.array([0.1, 0.2, 0.3, 0.4])] * 4
    draft = Draft((3, 1, 2, 0), (-1, -1, 0, 1), "independent", laws, None, (1, 0, 1, 2, 3))
    chain = draft.best_chain()
    assert (chain.tokens, chain.parents, chain.drawn, chain.draws) == ((1, 0), (-1, 0), "independent", None)
    chain.check(4)
