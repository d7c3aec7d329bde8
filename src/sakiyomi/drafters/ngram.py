"""ngram: prompt lookup. The last tokens have occurred before; guess that what followed them follows again.

Prompt lookup decoding (Saxena, 2023) over prompt and output, with a hash index in place of a search: one dictionary
per n-gram length, each entry the position behind the latest (or earliest) occurrence. An n-gram enters the index when
its continuation is known, so it never finds itself. A text that the caller predicts is followed too.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any, Literal

from sakiyomi.errors import ParameterError
from sakiyomi.lookup.automaton import new_ngram_source
from sakiyomi.lookup.prediction import PredictionReader
from sakiyomi.plugins import MAX_DRAFT_TOKENS, check_bounds
from sakiyomi.tree import Draft, expected_length
from sakiyomi.types import BurstSource, Drafter, DrafterContext, Sequence

MAX_NGRAM = 64
DOUBT = 3.0
"""A token behind a match of L tokens is believed with L / (L + this), as `suffix` believes what it saw once."""

MIN_CONFIDENCE = 0.1
"""What a predicted text is believed with at least where it is drafted."""


class NgramDrafter(Drafter):
    """Continues the longest suffix of the text that occurred earlier."""

    reads_prediction = True

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options of `ngram`.

        Args:
            num_speculative_tokens: tokens of a draft at most.
            max_ngram, min_ngram: lengths of the suffix that is looked up, longest first; 64 at most, since each
                length has an index of its own.
            occurrence: continue the "latest" or the "earliest" earlier occurrence.
        """

        num_speculative_tokens: int = 3
        max_ngram: int = 4
        min_ngram: int = 1
        occurrence: Literal["latest", "earliest"] = "latest"

        def __post_init__(self) -> None:
            check_bounds("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_DRAFT_TOKENS)
            check_bounds("max_ngram", self.max_ngram, 1, MAX_NGRAM)
            if not 1 <= self.min_ngram <= self.max_ngram:
                raise ParameterError(
                    f"min_ngram={self.min_ngram}, max_ngram={self.max_ngram}; give 1 <= min_ngram <= max_ngram."
                )
            if self.occurrence not in ("latest", "earliest"):
                raise ParameterError(f'occurrence={self.occurrence!r} is not allowed; give "latest" or "earliest".')

    def __init__(self, config: Config | None = None, context: DrafterContext | None = None) -> None:
        self.config = config or self.Config()

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        return [self._propose(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]

    def _propose(self, sequence: Sequence, budget: int) -> Draft:
        if budget <= 0:
            return Draft.empty()
        memo = self._memo_of(sequence)
        memo.index.extend(sequence.tokens)
        max_tokens = min(budget, self.config.num_speculative_tokens)
        draft = _believe(*memo.index.lookup(sequence.tokens, max_tokens))
        if memo.prediction is None:
            return draft
        memo.prediction.read(sequence.tokens[memo.num_read :])
        memo.num_read = len(sequence.tokens)
        return max(draft, memo.prediction.draft(max_tokens, MIN_CONFIDENCE), key=expected_length)

    def burst_source(self, sequence: Sequence) -> BurstSource | None:
        if sequence.prediction is not None:
            return None
        memo, config = self._memo_of(sequence), self.config
        if memo.source is None:
            is_earliest = config.occurrence == "earliest"
            memo.source = new_ngram_source(config.min_ngram, config.max_ngram, is_earliest, DOUBT)
        if memo.source is None:
            return None
        memo.source.extend(sequence.tokens[len(memo.source) :])
        return BurstSource(memo.source, config.num_speculative_tokens, config.num_speculative_tokens)

    def _memo_of(self, sequence: Sequence) -> _Memo:
        memo = sequence.memo
        if not isinstance(memo, _Memo):
            prediction = None if sequence.prediction is None else PredictionReader(sequence.prediction)
            memo = sequence.memo = _Memo(NgramIndex(self.config), prediction, sequence.num_prompt)
        return memo


@dataclass
class _Memo:
    """What the drafter keeps for a sequence: an index for steps, and its like for bursts."""

    index: NgramIndex
    prediction: PredictionReader | None
    num_read: int
    source: Any = None


class NgramIndex:
    """Where each n-gram of a growing text was last (or first) followed by something."""

    def __init__(self, config: NgramDrafter.Config) -> None:
        self._lengths = range(config.max_ngram, config.min_ngram - 1, -1)
        self._keeps_earliest = config.occurrence == "earliest"
        self._followers: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in self._lengths}
        self._num_indexed = 0

    def extend(self, tokens: Seq[int]) -> None:
        """Take in the tokens that were appended since the last call: O(max_ngram) each."""
        for position in range(self._num_indexed, len(tokens)):
            for n in self._lengths:
                if position >= n:
                    self._insert(n, tuple(tokens[position - n : position]), position)
        self._num_indexed = len(tokens)

    def _insert(self, n: int, key: tuple[int, ...], position: int) -> None:
        if self._keeps_earliest:
            self._followers[n].setdefault(key, position)
        else:
            self._followers[n][key] = position

    def lookup(self, tokens: Seq[int], num_tokens: int) -> tuple[list[int], int]:
        """The tokens that followed the longest known suffix of `tokens`, `num_tokens` at most, and its length."""
        for n in self._lengths:
            position = self._followers[n].get(tuple(tokens[-n:]))
            if position is not None:
                return list(tokens[position : position + num_tokens]), n
        return [], 0


def _believe(tokens: Seq[int], length: int) -> Draft:
    """A chain behind a match of `length` tokens; each right token makes the match longer."""
    shares = (matched / (matched + DOUBT) for matched in range(length, length + len(tokens)))
    parents = range(-1, len(tokens) - 1)
    return Draft(tuple(tokens), tuple(parents), confidences=tuple(accumulate(shares, mul)))
