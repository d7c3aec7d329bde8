"""Draft: a tree of guessed tokens, with the few verbs that verifiers and drafters need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import exp
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sakiyomi.errors import ParameterError

Drawn = Literal["fixed", "coupled", "independent", "without_replacement"]
Rows = Sequence[npt.NDArray[Any]]
ROOT = -1
SAMPLED: tuple[Drawn, ...] = ("independent", "without_replacement")
LAW_TOLERANCE = 1e-3  # of the sum of a law; what single precision makes of 200,000 ids is far inside


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """What the first layers of a model have made of rows that wait, uncommitted, in a cache of the model's.

    The keys and values are in the cache, so this is good for the next pass over that cache alone: a model compares the
    object with the one its cache knows, and computes everything anew where they differ.

    Attributes:
        tokens, parents: the rows, as in `types.Span`.
        layers: the layers that have run over them.
        num_leading: how many of these are the model's first ones, without a gap.
        hidden: the rows' hidden states [M, H] behind those.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    layers: tuple[int, ...]
    num_leading: int
    hidden: Any

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Probes:
    """Rows that the verification computes beside a draft and never accepts: their answers are for the drafter alone.

    Attributes:
        tokens: P token ids; unlike a draft's nodes, siblings may be equal.
        parents: P indices into the probes, each smaller than its own index, -1 for children of the root.
        asked: the probes, ascending, behind which the most probable token is wanted.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    asked: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.tokens)

    def check(self, vocab_size: int) -> None:
        """Raise ParameterError unless ids are in range, parents come first and what is asked exists."""
        if len(self.tokens) != len(self.parents):
            raise ParameterError(f"a draft has {len(self.tokens)} probes but {len(self.parents)} parents of them.")
        for row, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if not 0 <= token < vocab_size:
                raise ParameterError(f"probe {row} holds id {token}; ids are 0 to {vocab_size - 1}.")
            if not ROOT <= parent < row:
                raise ParameterError(f"probe {row} has parent {parent}; a parent comes before its children.")
        if list(self.asked) != sorted({row for row in self.asked if 0 <= row < len(self)}):
            raise ParameterError(f"asked={self.asked} of {len(self)} probes; name some of them, ascending.")


@dataclass(frozen=True)
class Draft:
    """A tree of N guessed tokens below the last committed token (the root, written -1).

    Attributes:
        tokens: N token ids.
        parents: N indices, each smaller than its own index, -1 for children of the root.
        drawn: how the tokens were found. "fixed": a function of the prefix alone; "coupled": with the target's own
            noise; "independent" and "without_replacement": sampled from `probs`.
        probs: for sampled drafts one law per node, the one it was drawn from, [V] or [K] over its `probs_ids`. Under
            "without_replacement" it is the law of the first of the siblings, that is before any was taken out.
        probs_ids: None where `probs` covers the vocabulary, else for each node the ascending ids [K] of its law.
        draws: for sampled drafts the nodes in the order of drawing among siblings; independent draws may draw a node
            again. None: each node once, in order. The verifier must learn of every draw, and a sampled node must
            never be left out because of its own token or probability.
        confidences: for each node the drafter's estimate of the probability that the text passes through it, or None
            where the drafter has none. Never larger than the parent's.
        computed: what the drafter, being the target's own first layers, has computed of the root's row and of the first
            nodes; the verification goes on from there.
        probes: rows to compute beside the nodes. They count as nodes where a number of nodes is the limit.

    Siblings carry distinct tokens. `check` raises on a draft that breaks these rules.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    drawn: Drawn = "fixed"
    probs: Rows | None = field(default=None, compare=False)
    probs_ids: Rows | None = field(default=None, compare=False)
    draws: tuple[int, ...] | None = None
    confidences: tuple[float, ...] | None = None
    computed: Computed | None = field(default=None, compare=False)
    probes: Probes | None = None

    @classmethod
    def empty(cls) -> Draft:
        """No guess: the step is a plain one. Always the same object."""
        return _EMPTY

    @classmethod
    def chain(cls, tokens: Iterable[int], drawn: Drawn = "fixed") -> Draft:
        """One guess after the other."""
        tokens = tuple(tokens)
        return cls(tokens, tuple(range(-1, len(tokens) - 1)), drawn)

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]], drawn: Drawn = "fixed") -> Draft:
        """The smallest tree that holds every path of tokens from the root."""
        tokens: list[int] = []
        parents: list[int] = []
        children: dict[tuple[int, int], int] = {}
        for path in paths:
            node = ROOT
            for token in path:
                key = (node, token)
                if key not in children:
                    children[key] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                node = children[key]
        return cls(tuple(tokens), tuple(parents), drawn)

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; children of the root have depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        return {
            (parent, token): node for node, (parent, token) in enumerate(zip(self.parents, self.tokens, strict=True))
        }

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` (-1: the root) that carries `token`, or None."""
        return self._children.get((node, token))

    def path(self, node: int) -> tuple[int, ...]:
        """The nodes from the root's child down to `node`."""
        nodes: list[int] = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))

    def ancestors(self) -> tuple[tuple[int, ...], ...]:
        """For each node, its path."""
        return tuple(self.path(node) for node in range(len(self)))

    @cached_property
    def is_chain(self) -> bool:
        """Whether each node is the only child of the one before."""
        return self.parents == tuple(range(-1, len(self) - 1))

    @cached_property
    def _draws_below(self) -> dict[int, list[int]]:
        below: dict[int, list[int]] = {}
        for node in range(len(self)) if self.draws is None else self.draws:
            below.setdefault(self.parents[node], []).append(node)
        return below

    def draws_below(self, node: int) -> Sequence[int]:
        """The children of `node` (-1: the root) in the order of drawing, with repetitions."""
        return self._draws_below.get(node, ())

    def follow(self, choose: Callable[[int, tuple[int, ...]], int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Walk down from the root while a child carries the chosen token.

        Args:
            choose: from a node (-1: the root) and the tokens down to it to the token that follows.

        Returns:
            The nodes passed, and all chosen tokens: one more than nodes.
        """
        path: list[int] = []
        tokens: list[int] = []
        node: int | None = ROOT
        while node is not None:
            token = choose(node, tuple(tokens))
            tokens.append(token)
            node = self.child(node, token)
            if node is not None:
                path.append(node)
        return tuple(path), tuple(tokens)

    def trim(self, max_nodes: int, max_depth: int) -> Draft:
        """The draft without nodes deeper than `max_depth` and with at most `max_nodes` nodes, in their order.

        Of a sampled draft at most `max_nodes` draws stay, so that no draw is left out because of what it drew. Probes
        stay where there is room for all of them.
        """
        if self.probes is not None and len(self) + len(self.probes) > max_nodes:
            return replace(self, probes=None).trim(max_nodes, max_depth)
        draws: Sequence[int] = range(len(self)) if self.draws is None else self.draws
        # No node is deeper than there are nodes.
        if len(draws) <= max_nodes and (len(self) <= max_depth or all(depth <= max_depth for depth in self.depths)):
            return self
        draws = [node for node in draws if self.depths[node] <= max_depth][: max(max_nodes, 0)]
        kept = sorted(set(draws))
        index = {ROOT: ROOT} | {node: new for new, node in enumerate(kept)}
        return Draft(
            tuple(self.tokens[node] for node in kept),
            tuple(index[self.parents[node]] for node in kept),
            self.drawn,
            _rows(self.probs, kept),
            _rows(self.probs_ids, kept),
            None if self.draws is None else tuple(index[node] for node in draws),
            None if self.confidences is None else tuple(self.confidences[node] for node in kept),
            self.computed,
            self.probes,
        )

    def best_chain(self) -> Draft:
        """The path that is expected to be accepted longest, for a model that checks no trees.

        Of a sampled draft it is the path of the first draws, so that none is left out because of what it drew.
        """
        if self.is_chain:
            return self
        if self.drawn in SAMPLED:
            kept, node = [], ROOT
            while below := self.draws_below(node):
                node = below[0]
                kept.append(node)
        else:
            kept = list(self.path(self._best_leaf()))
        return Draft(
            tuple(self.tokens[node] for node in kept),
            tuple(range(-1, len(kept) - 1)),
            self.drawn,
            _rows(self.probs, kept),
            _rows(self.probs_ids, kept),
            None,
            None if self.confidences is None else tuple(self.confidences[node] for node in kept),
        )

    def _best_leaf(self) -> int:
        """The node whose path has the largest sum of confidences, the first of equal ones."""
        sums: list[float] = []
        for parent, confidence in zip(self.parents, _confidences(self), strict=True):
            sums.append(confidence + (0.0 if parent == ROOT else sums[parent]))
        return max(range(len(sums)), key=lambda node: sums[node])

    def check(self, vocab_size: int) -> None:
        """Raise ParameterError unless ids are in range, parents come first, siblings differ and laws are laws."""
        if len(self.tokens) != len(self.parents):
            raise ParameterError(f"a draft has {len(self.tokens)} tokens but {len(self.parents)} parents.")
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if not 0 <= token < vocab_size:
                raise ParameterError(f"draft node {node} holds id {token}; ids are 0 to {vocab_size - 1}.")
            if not ROOT <= parent < node:
                raise ParameterError(f"draft node {node} has parent {parent}; a parent comes before its children.")
        if len(self._children) != len(self.tokens):
            raise ParameterError("a draft has two siblings with the same token; siblings must differ.")
        if self.confidences is not None and len(self.confidences) != len(self.tokens):
            raise ParameterError(f"a draft has {len(self.tokens)} tokens but {len(self.confidences)} confidences.")
        if self.drawn in SAMPLED:
            self._check_laws(vocab_size)
        if self.probes is not None:
            self.probes.check(vocab_size)

    def _check_laws(self, vocab_size: int) -> None:
        if self.draws is not None and set(self.draws) != set(range(len(self))):
            raise ParameterError(f"draws={self.draws} of a sampled draft; name each of its {len(self)} nodes.")
        if self.probs is None or len(self.probs) != len(self):
            raise ParameterError(f"a sampled draft of {len(self)} nodes needs as many laws in probs.")
        if self.probs_ids is not None and len(self.probs_ids) != len(self):
            raise ParameterError(f"a sampled draft of {len(self)} nodes has {len(self.probs_ids)} rows of probs_ids.")
        checked: set[int] = set()
        for node, probs in enumerate(self.probs):
            ids = None if self.probs_ids is None else self.probs_ids[node]
            if id(probs) not in checked:
                checked.add(id(probs))
                _check_law(node, probs, ids, vocab_size)
            index = self.tokens[node] if ids is None else int(np.searchsorted(ids, self.tokens[node]))
            is_known = index < len(probs) and (ids is None or ids[index] == self.tokens[node])
            if not is_known or not probs[index] > 0:
                raise ParameterError(f"draft node {node} cannot have been drawn: its law gives it probability 0.")


def _check_law(node: int, probs: npt.NDArray[Any], ids: npt.NDArray[Any] | None, vocab_size: int) -> None:
    size = vocab_size if ids is None else len(ids)
    if probs.shape != (size,):
        raise ParameterError(f"the law of draft node {node} has shape {probs.shape}; its ids are {size}.")
    if not probs.min() >= 0 or not abs(float(probs.sum()) - 1) <= LAW_TOLERANCE:
        raise ParameterError(f"the law of draft node {node} is none: probabilities of at least 0 that sum to 1.")
    if ids is not None and (ids[0] < 0 or ids[-1] >= vocab_size or not (np.diff(ids) > 0).all()):
        raise ParameterError(f"the law of draft node {node} needs ascending ids from 0 to {vocab_size - 1}.")


def _rows(rows: Rows | None, kept: Sequence[int]) -> Rows | None:
    return None if rows is None else [rows[node] for node in kept]


class TreeBuilder:
    """A dynamic tree: grown level by level where the drafter is confident, then cut to its most confident nodes.

    As in EAGLE-2 (Li et al., 2024): a node's confidence is the product of the drafter's probabilities along its path.
    A tree of sampled tokens may grow this way too, since only what is already drawn decides where to draw next, but it
    must not be cut.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.confidences: list[float] = []
        """Logarithms, the parents' included."""

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, tokens: Iterable[int], confidences: Iterable[float]) -> None:
        """Append children of `parent` (-1: the root), with the logarithms of their own confidences."""
        depth, above = (1, 0.0) if parent == ROOT else (self.depths[parent] + 1, self.confidences[parent])
        for token, confidence in zip(tokens, confidences, strict=True):
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(depth)
            self.confidences.append(above + min(confidence, 0.0))

    def path_tokens(self, node: int) -> tuple[int, ...]:
        """The tokens from the root's child down to `node`."""
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tuple(reversed(tokens))

    def frontier(self, width: int, end_ids: frozenset[int] = frozenset()) -> list[int]:
        """The `width` most confident nodes of the deepest level that do not end the text, in order."""
        deepest = max(self.depths, default=0)
        nodes = [n for n, depth in enumerate(self.depths) if depth == deepest and self.tokens[n] not in end_ids]
        return sorted(self._rank(nodes)[:width])

    def select(self, max_nodes: int) -> list[int]:
        """The `max_nodes` most confident nodes, in order; with a node its parent is among them."""
        return sorted(self._rank(range(len(self)))[:max_nodes])

    def build(self, nodes: Sequence[int] | None = None, drawn: Drawn = "fixed") -> Draft:
        """The draft of all nodes, or of some that hold every parent of theirs.

        It has confidences unless every node was added with the logarithm 0, as by a drafter that knows none.
        """
        nodes = range(len(self)) if nodes is None else nodes
        index = {ROOT: ROOT} | {node: new for new, node in enumerate(nodes)}
        return Draft(
            tuple(self.tokens[node] for node in nodes),
            tuple(index[self.parents[node]] for node in nodes),
            drawn,
            confidences=tuple(exp(self.confidences[node]) for node in nodes) if any(self.confidences) else None,
        )

    def _rank(self, nodes: Iterable[int]) -> list[int]:
        # A child as confident as its parent (probability 1) must not come before it.
        return sorted(nodes, key=lambda node: (-self.confidences[node], self.depths[node], node))


_EMPTY = Draft((), ())

DEFAULT_CONFIDENCE = 0.6
"""Of each further token of a draft whose drafter tells none; what lookup and small models reach on everyday text."""


def expected_length(draft: Draft) -> float:
    """How many tokens of a draft its drafter expects to be accepted."""
    return sum(_confidences(draft))


def merge_drafts(drafts: Sequence[Draft], max_nodes: int) -> Draft:
    """One tree of the most confident nodes of several drafts, the most confident first.

    A node that several drafts hold counts once, with the largest of their confidences. Sampled drafts cannot be merged:
    a rule that keeps the distribution must learn of every draw.
    """
    assert all(draft.drawn not in SAMPLED for draft in drafts), "sampled drafts cannot be merged"
    tree = _MergedTree()
    for draft in drafts:
        tree.add(draft)
    drawn: Drawn = "coupled" if any(draft.drawn == "coupled" for draft in drafts) else "fixed"
    return tree.select(max_nodes, drawn)


def _confidences(draft: Draft) -> Sequence[float]:
    if draft.confidences is not None:
        return draft.confidences
    return [DEFAULT_CONFIDENCE**depth for depth in draft.depths]


class _MergedTree:
    """Nodes in the order of their discovery, so that a parent's number is smaller than its children's."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], int] = {}
        self._keys: list[tuple[int, int]] = []
        self._confidences: list[float] = []

    def add(self, draft: Draft) -> None:
        index = {ROOT: ROOT}
        confidences = _confidences(draft)
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
            key = (index[parent], token)
            if key not in self._nodes:
                self._nodes[key] = len(self._keys)
                self._keys.append(key)
                self._confidences.append(0.0)
            index[node] = self._nodes[key]
            limit = 1.0 if key[0] == ROOT else self._confidences[key[0]]
            self._confidences[index[node]] = max(self._confidences[index[node]], min(confidences[node], limit))

    def select(self, max_nodes: int, drawn: Drawn) -> Draft:
        # A parent comes before its children: it is at least as confident, and was found first.
        order = sorted(range(len(self._keys)), key=lambda node: -self._confidences[node])[: max(max_nodes, 0)]
        index = {ROOT: ROOT} | {node: new for new, node in enumerate(order)}
        return Draft(
            tuple(self._keys[node][1] for node in order),
            tuple(index[self._keys[node][0]] for node in order),
            drawn,
            confidences=tuple(self._confidences[node] for node in order),
        )
