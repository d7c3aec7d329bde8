"""Draft: a tree of guessed tokens, with the few verbs that verifiers and drafters need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from sakiyomi.errors import ParameterError

Drawn = Literal["fixed", "coupled", "independent", "without_replacement"]
ROOT = -1


@dataclass(frozen=True)
class Draft:
    """A tree of N guessed tokens below the last committed token (the root, written -1).

    Attributes:
        tokens: N token ids.
        parents: N indices, each smaller than its own index, -1 for children of the root.
        drawn: how the tokens were found. "fixed": a function of the prefix alone; "coupled": with the target's own
            noise; "independent" and "without_replacement": sampled from `probs`.
        probs: for sampled drafts, the laws the children were drawn from, else None.
        confidences: for each node the drafter's estimate of the probability that the text passes through it, or None
            where the drafter has none. Never larger than the parent's.

    Siblings carry distinct tokens. `check` raises on a draft that breaks these rules.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    drawn: Drawn = "fixed"
    probs: Any = None
    confidences: tuple[float, ...] | None = None

    @classmethod
    def empty(cls) -> Draft:
        """No guess: the step is a plain one."""
        return cls((), ())

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

    def trim(self, max_nodes: int, max_depth: int) -> Draft:
        """The draft without nodes deeper than `max_depth` and with at most `max_nodes` nodes, in their order."""
        if len(self) <= max_nodes and all(depth <= max_depth for depth in self.depths):
            return self
        kept = [node for node, depth in enumerate(self.depths) if depth <= max_depth][: max(max_nodes, 0)]
        index = {ROOT: ROOT} | {node: new for new, node in enumerate(kept)}
        probs = None if self.probs is None else [self.probs[node] for node in kept]
        return Draft(
            tuple(self.tokens[node] for node in kept),
            tuple(index[self.parents[node]] for node in kept),
            self.drawn,
            probs,
            confidences=None if self.confidences is None else tuple(self.confidences[node] for node in kept),
        )

    def check(self, vocab_size: int) -> None:
        """Raise ParameterError unless ids are in range, parents come first and siblings differ."""
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
    assert all(draft.drawn in ("fixed", "coupled") for draft in drafts), "sampled drafts cannot be merged"
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
