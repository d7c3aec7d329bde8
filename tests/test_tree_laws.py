"""Drafts: what is cut, what is refused, and trees that grow where a drafter is confident."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sakiyomi.errors import ParameterError
from sakiyomi.tree import ROOT, Draft, TreeBuilder

VOCAB = 6
UNIFORM = np.full(VOCAB, 1 / VOCAB)


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
