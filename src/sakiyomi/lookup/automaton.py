"""Suffix automata: every substring of a growing text, with its count and what has followed it.

The automaton (Blumer et al., 1985; for drafting Hu et al., 2024) has one state for each class of substrings that end at
the same places: at most 2N states and 3N transitions for N tokens, built online in O(1) amortised operations a token.
Counts saturate, so that a token costs at most `max_count` updates even in a text that repeats a single token.

`new_automaton` gives the C++ form where it was built, else `PythonAutomaton`, its reference. The two give the same
trees.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import islice
from typing import Any, Protocol

try:
    from sakiyomi._native import NgramSource, SuffixAutomaton, SuffixSource
except ImportError:
    NgramSource = SuffixAutomaton = SuffixSource = None

MAX_COUNT = 255
"""Counts are exact below this."""

MAX_SCANNED = 64
"""Followers of a match that a tree considers, newest first."""

NUM_BYTES_PER_STATE, NUM_BYTES_PER_EDGE = 340, 60
"""What CPython takes for the lists, dictionaries and numbers of `PythonAutomaton`, on average."""

Tree = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]
"""Tokens, parents (-1: the root), and for each node the estimated probability that the text passes through it."""


class Automaton(Protocol):
    """A text with an index of all its substrings. Ids below 0 mark the end of a text and are never guessed.

    A match is a pair (state, length): the string of `length` tokens that some text ends with and that occurs here.
    (0, 0) is the empty match. Matches stay valid while the automaton grows.
    """

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        ...

    def match_suffix(self) -> tuple[int, int]:
        """The match of the longest suffix of the automaton's own text that occurs earlier too, in O(1)."""
        ...

    def advance(self, state: int, length: int, tokens: Sequence[int]) -> tuple[int, int]:
        """From the longest match of another text to that of the text with `tokens` behind it."""
        ...

    def followers(self, state: int) -> list[tuple[int, int]]:
        """The tokens that have followed the strings of a state, newest first, with their counts."""
        ...

    def grow_tree(
        self,
        state: int,
        length: int,
        max_nodes: int,
        max_depth: int,
        width: int,
        min_match: int,
        min_confidence: float,
        doubt: float,
    ) -> Tree:
        """A tree of guesses behind a match, the most confident node first.

        A token that followed a match of L tokens c times, where c' is the sum over all D followers, is believed with
        confidence c / (c' + D * doubt / L); a node's confidence is the product along its path. So long matches give
        long drafts, frequent followers come first, and rare ones are branches.

        Args:
            max_nodes, max_depth: limits of the tree.
            width: children of a node at most; 1 makes chains.
            min_match: shorter matches draft nothing.
            min_confidence: nodes below are left out.
        """
        ...

    def shrink(self) -> None:
        """Give spare memory back; the text will not grow any more."""
        ...

    def __len__(self) -> int:
        """Tokens of the text."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory held, spare room included."""
        ...

    @property
    def num_used_bytes(self) -> int:
        """Memory held, spare room left out."""
        ...

    @property
    def num_states(self) -> int: ...

    @property
    def num_edges(self) -> int: ...


class PythonAutomaton:
    """The reference; see `Automaton`."""

    def __init__(self, max_count: int = MAX_COUNT) -> None:
        self._max_count = max_count
        self._last = 0
        self._num_edges = 0
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._count = [0]
        self._last_end = [0]

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._append(token)

    def _append(self, token: int) -> None:
        follow, link, length = self._next, self._link, self._length
        end = length[self._last] + 1
        current = self._new_state({}, 0, end, 0, 0)
        state = self._last
        while state != -1 and token not in follow[state]:
            follow[state][token] = current
            self._num_edges += 1
            state = link[state]
        if state != -1:
            link[current] = self._split(state, token)
        self._last = state = current
        while state != 0 and self._count[state] < self._max_count:
            self._count[state] += 1
            self._last_end[state] = end
            state = link[state]

    def _split(self, state: int, token: int) -> int:
        """The state of exactly the string of `state` and `token`, taken out of the one it may share."""
        follow, link = self._next, self._link
        target, length = follow[state][token], self._length[state] + 1
        if self._length[target] == length:
            return target
        clone = self._new_state(dict(follow[target]), link[target], length, self._count[target], self._last_end[target])
        self._num_edges += len(follow[target])
        while state != -1 and follow[state].get(token) == target:
            follow[state][token] = clone
            state = link[state]
        link[target] = clone
        return clone

    def _new_state(self, follow: dict[int, int], link: int, length: int, count: int, last_end: int) -> int:
        self._next.append(follow)
        self._link.append(link)
        self._length.append(length)
        self._count.append(count)
        self._last_end.append(last_end)
        return len(self._next) - 1

    def match_suffix(self) -> tuple[int, int]:
        state = self._link[self._last]
        return (0, 0) if state == -1 else (state, self._length[state])

    def advance(self, state: int, length: int, tokens: Sequence[int]) -> tuple[int, int]:
        while state != 0 and self._length[self._link[state]] >= length:  # the state was split since
            state = self._link[state]
        for token in tokens:
            while state != 0 and token not in self._next[state]:
                state = self._link[state]
                length = self._length[state]
            if token in self._next[state]:
                state = self._next[state][token]
                length += 1
        return state, length

    def followers(self, state: int) -> list[tuple[int, int]]:
        return [(token, self._count[target]) for token, target in reversed(self._next[state].items())]

    def grow_tree(
        self,
        state: int,
        length: int,
        max_nodes: int,
        max_depth: int,
        width: int,
        min_match: int,
        min_confidence: float,
        doubt: float,
    ) -> Tree:
        tokens: list[int] = []
        parents: list[int] = []
        confidences: list[float] = []
        heap: list[tuple[float, int, int, int, int, int, int]] = []
        num_found = 0
        node, depth, confidence = -1, 0, 1.0
        while True:
            if depth < max_depth:
                state, length = self._climb(state, length)
                if state != 0 and length >= min_match:
                    for token, target, share in self._rank(state, length, width, doubt):
                        if confidence * share < min_confidence:
                            break
                        if token >= 0:
                            found = (-confidence * share, num_found, token, node, target, length + 1, depth + 1)
                            heapq.heappush(heap, found)
                            num_found += 1
            if not heap or len(tokens) >= max_nodes:
                return tuple(tokens), tuple(parents), tuple(confidences)
            negative, _, token, parent, state, length, depth = heapq.heappop(heap)
            confidence, node = -negative, len(tokens)
            tokens.append(token)
            parents.append(parent)
            confidences.append(confidence)

    def _climb(self, state: int, length: int) -> tuple[int, int]:
        """Shorten a match that runs into the end of the text until something has followed it."""
        while state != 0 and not self._next[state]:
            state = self._link[state]
            length = self._length[state]
        return state, length

    def _rank(self, state: int, length: int, width: int, doubt: float) -> list[tuple[int, int, float]]:
        """The `width` most frequent followers, the latest first among equals: (token, state, confidence)."""
        found = [
            (self._count[target], self._last_end[target], token, target)
            for token, target in islice(reversed(self._next[state].items()), MAX_SCANNED)
        ]
        weight = sum(count for count, *_ in found) + len(found) * doubt / length
        best = heapq.nlargest(width, found) if len(found) > width else sorted(found, reverse=True)
        return [(token, target, count / weight) for count, _, token, target in best]

    def shrink(self) -> None:
        return None

    def __len__(self) -> int:
        return self._length[self._last]

    @property
    def num_bytes(self) -> int:
        """An estimate."""
        return self.num_states * NUM_BYTES_PER_STATE + self.num_edges * NUM_BYTES_PER_EDGE

    @property
    def num_used_bytes(self) -> int:
        return self.num_bytes

    @property
    def num_states(self) -> int:
        return len(self._next)

    @property
    def num_edges(self) -> int:
        return self._num_edges


def new_automaton(max_count: int = MAX_COUNT) -> Automaton:
    """An empty automaton, in C++ where that was built."""
    if SuffixAutomaton is None:
        return PythonAutomaton(max_count)
    automaton: Automaton = SuffixAutomaton(max_count)
    return automaton


def new_source(automaton: Automaton, width: int, min_match: int, min_confidence: float, doubt: float) -> Any | None:
    """What drafts from an automaton over the text itself within a burst, by `grow_tree` with these numbers, and appends
    what is committed (`types.BurstSource`); None where only Python can.
    """
    if SuffixAutomaton is None or not isinstance(automaton, SuffixAutomaton):
        return None
    return SuffixSource(automaton, width, min_match, min_confidence, doubt)


def new_ngram_source(min_ngram: int, max_ngram: int, keeps_earliest: bool, doubt: float) -> Any | None:
    """What drafts as `drafters/ngram.py` does within a burst, from a text that `extend` appends to; else None."""
    return None if NgramSource is None else NgramSource(min_ngram, max_ngram, keeps_earliest, doubt)
