"""Following a predicted text: what the caller expects the answer to be, as a source of guesses.

As in the field's `prediction` parameter: edits and agents return most of a known text. A cursor walks through the
prediction while the answer agrees with it. Where the answer departs, several places to go on at are kept at once, as
branches of a tree: behind the same number of tokens (something was replaced), at the same place (something was put
in), and behind tokens that have come since (something was left out).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from sakiyomi.tree import Draft, merge_drafts

PRIOR_HITS, PRIOR_MISSES = 18, 1
"""What the reader believes at the start, so that the first draft is long; a useless prediction soon drafts little."""

WINDOW = 48
"""Tokens behind the point of departure in which the reader looks for the way back, one by one."""

NUM_SURE = 3
"""Tokens in a row after which a place is taken for the right one."""

SEARCH_LENGTHS = (12, 6, 3)
"""Tokens that are searched in the whole prediction once the answer is outside the window."""

NUM_BRANCHES = 3
BRANCH_CONFIDENCE = 0.6
"""Of the first branch at a departure; each further one has this share of the one before."""


class PredictionReader:
    """Where in a prediction an answer stands. `read` takes the answer's tokens, `draft` tells what should follow."""

    def __init__(self, prediction: Sequence[int]) -> None:
        self._tokens = list(prediction)
        self._bytes = array("i", self._tokens).tobytes()
        self._cursor = 0
        self._hits, self._misses = PRIOR_HITS, PRIOR_MISSES
        self._recent: list[int] = []
        self._num_lost = 0
        self._streaks: dict[int, int] = {}
        """While lost: places that could come next, with the number of tokens before them that agree."""

    @property
    def is_lost(self) -> bool:
        return self._num_lost > 0

    def read(self, tokens: Iterable[int]) -> None:
        """Take further tokens of the answer."""
        for token in tokens:
            self._recent.append(token)
            if not self.is_lost and self._cursor < len(self._tokens) and self._tokens[self._cursor] == token:
                self._cursor += 1
                self._hits += 1
            else:
                self._lose(token)
        del self._recent[: -SEARCH_LENGTHS[0]]

    def _lose(self, token: int) -> None:
        self._num_lost += 1
        self._misses += 1
        start, tokens = self._cursor, self._tokens
        window = range(start, min(start + WINDOW + self._num_lost, len(tokens)))
        self._streaks = {i + 1: self._streaks.get(i, 0) + 1 for i in window if tokens[i] == token}
        place = max(self._streaks, key=lambda place: (self._streaks[place], -place), default=0)
        length = self._streaks.get(place, 0)
        if length < NUM_SURE and self._num_lost >= NUM_SURE:
            place, length = self._search()
        if length >= NUM_SURE:
            self._cursor, self._num_lost, self._streaks = place, 0, {}
            self._hits += length

    def _search(self) -> tuple[int, int]:
        """The next place behind the cursor, or else the first of all, where the last tokens stand: (place, length)."""
        for length in SEARCH_LENGTHS:
            if len(self._recent) >= length:
                for start in (self._cursor, 0):
                    place = self._find(self._recent[-length:], start)
                    if place >= 0:
                        return place + length, length
        return 0, 0

    def _find(self, tokens: Sequence[int], start: int) -> int:
        wanted = array("i", tokens)
        place = self._bytes.find(wanted.tobytes(), start * wanted.itemsize)
        while place % wanted.itemsize and place >= 0:  # found across the border of two ids
            place = self._bytes.find(wanted.tobytes(), place + 1)
        return place // wanted.itemsize

    def draft(self, max_nodes: int, min_confidence: float) -> Draft:
        """What should come next, `max_nodes` tokens at most, each believed with at least `min_confidence`."""
        step = self._hits / (self._hits + self._misses)
        if not self.is_lost:
            return self._chain(self._cursor, 1.0, step, max_nodes, min_confidence)
        branches = []
        confidence = 1.0
        for place in self._places()[:NUM_BRANCHES]:
            confidence *= BRANCH_CONFIDENCE
            branches.append(self._chain(place, confidence, step, max_nodes, min_confidence))
        return merge_drafts(branches, max_nodes)

    def _places(self) -> list[int]:
        """Where to go on at a departure, the most likely place first."""
        again = sorted(self._streaks, key=lambda place: (-self._streaks[place], place))
        replaced, inserted = self._cursor + self._num_lost, self._cursor
        return list(dict.fromkeys(place for place in (*again[:2], replaced, inserted) if place < len(self._tokens)))

    def _chain(self, place: int, confidence: float, step: float, max_nodes: int, min_confidence: float) -> Draft:
        confidences: list[float] = []
        while len(confidences) < max_nodes and confidence * step >= min_confidence:
            confidence *= step
            confidences.append(confidence)
        tokens = self._tokens[place : place + len(confidences)]
        return Draft(tuple(tokens), tuple(range(-1, len(tokens) - 1)), confidences=tuple(confidences[: len(tokens)]))
