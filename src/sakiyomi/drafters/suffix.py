"""suffix: the longest end of the text that occurred before, continued by what followed it, as a chain or a tree.

A suffix automaton over prompt and output (Hu et al., 2024, SAM-Decoding) finds the match in O(1); how often each token
followed decides the order, the branches and the length of the draft (as in SuffixDecoding; Oliaro et al., 2024). Two
more sources are asked where they exist: a store of finished texts, and the text that the caller predicts.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from sakiyomi.errors import ParameterError
from sakiyomi.lookup.automaton import Automaton, new_automaton, new_source
from sakiyomi.lookup.prediction import PredictionReader
from sakiyomi.lookup.store import StoreReader, TextStore, open_store
from sakiyomi.plugins import MAX_DRAFT_TOKENS, check_bounds
from sakiyomi.tree import Draft, expected_length
from sakiyomi.types import BurstSource, Drafter, DrafterContext, Sequence

NUM_LEAD_TOKENS = 16
"""Tokens of the prompt that the store keeps in front of an answer, so that its beginning can be found."""

DEFAULT_STORE_MB = 64.0
MAX_MATCH = 1_000_000


class SuffixDrafter(Drafter):
    """Continues the longest suffix of the text that occurred earlier, in this text or in a store."""

    reads_prediction = True

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options of `suffix`.

        Args:
            num_speculative_tokens: nodes of a draft at most.
            width: children of a node at most; 1 drafts chains.
            min_match: shorter matches draft nothing.
            min_confidence: what is believed with less is not drafted; so longer matches make longer drafts.
            doubt: how little short matches are believed: a token that always followed a match of L tokens seen once
                is believed with 1 / (1 + doubt / L).
            store_mb: megabytes for finished answers, from which all later requests may draft; 0 keeps none. It lets
                requests learn of each other, by their speed, so it is off by default.
            store_file: a file in which the store outlives the process; turns it on with 64 MB.
        """

        num_speculative_tokens: int = 16
        width: int = 3
        min_match: int = 1
        min_confidence: float = 0.08
        doubt: float = 3.0
        store_mb: float = 0.0
        store_file: str | None = None

        def __post_init__(self) -> None:
            check_bounds("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_DRAFT_TOKENS)
            check_bounds("width", self.width, 1, MAX_DRAFT_TOKENS)
            check_bounds("min_match", self.min_match, 1, MAX_MATCH)
            if not 0 < self.min_confidence < 1:
                raise ParameterError(f"min_confidence={self.min_confidence}; give a number between 0 and 1.")
            if not 0 < self.doubt < inf:
                raise ParameterError(f"doubt={self.doubt}; give a finite number above 0.")
            if not (self.store_mb == 0 or 0.1 <= self.store_mb <= 1e6):
                raise ParameterError(f"store_mb={self.store_mb}; give 0 for no store, or 0.1 to 1000000.")

    def __init__(self, config: Config | None = None, context: DrafterContext | None = None) -> None:
        self.config = config = config or self.Config()
        self.store: TextStore | None = None
        if config.store_mb or config.store_file is not None:
            path = None if config.store_file is None else Path(config.store_file)
            vocab_size = 0 if context is None else context.target.info.vocab_size
            self.store = open_store(int((config.store_mb or DEFAULT_STORE_MB) * 1e6), path, vocab_size)

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        return [self._propose(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]

    def burst_source(self, sequence: Sequence) -> BurstSource | None:
        if self.store is not None or sequence.prediction is not None:
            return None
        memo, config = self._read(sequence), self.config
        if memo.source is None:
            memo.source = new_source(
                memo.automaton, config.width, config.min_match, config.min_confidence, config.doubt
            )
        if memo.source is None:
            return None
        return BurstSource(memo.source, config.num_speculative_tokens, config.num_speculative_tokens)

    def forget(self, sequence: Sequence) -> None:
        # At a new turn of a chat the sequence is the new one, and the memo that of the turn before.
        if self.store is not None and isinstance(sequence.memo, _Memo):
            self.store.add(sequence.memo.answer())
        sequence.memo = None

    def _propose(self, sequence: Sequence, budget: int) -> Draft:
        max_nodes = min(budget, self.config.num_speculative_tokens)
        if max_nodes <= 0:
            return Draft.empty()
        memo = self._read(sequence)
        best = self._grow(memo.automaton, *memo.automaton.match_suffix(), max_nodes)
        if memo.store_reader is None and memo.prediction is None:
            return best
        others = [self._grow_from_store(memo, max_nodes)] if memo.store_reader is not None else []
        if memo.prediction is not None:
            others.append(memo.prediction.draft(max_nodes, self.config.min_confidence))
        return max([best, *others], key=expected_length)

    def _read(self, sequence: Sequence) -> _Memo:
        memo = sequence.memo
        if not isinstance(memo, _Memo):
            memo = sequence.memo = _Memo(sequence, self.store)
        memo.read(sequence)
        return memo

    def _grow_from_store(self, memo: _Memo, max_nodes: int) -> Draft:
        assert self.store is not None
        assert memo.store_reader is not None
        with self.store.lock:
            automaton, state, length = memo.store_reader.match(memo.tokens)
            return self._grow(automaton, state, length, max_nodes)

    def _grow(self, automaton: Automaton, state: int, length: int, max_nodes: int) -> Draft:
        config = self.config
        tokens, parents, confidences = automaton.grow_tree(
            state,
            length,
            max_nodes,
            max_nodes,
            config.width,
            config.min_match,
            config.min_confidence,
            config.doubt,
        )
        return Draft(tokens, parents, confidences=confidences)


class _Memo:
    """What the drafter keeps for a sequence."""

    def __init__(self, sequence: Sequence, store: TextStore | None) -> None:
        self.tokens = sequence.tokens
        self.automaton = new_automaton()
        self.source: Any = None
        self.store_reader = None if store is None else StoreReader(store)
        self.prediction = None if sequence.prediction is None else PredictionReader(sequence.prediction)
        self._num_prompt = sequence.num_prompt

    def read(self, sequence: Sequence) -> None:
        """Take in what the sequence got since the last call."""
        self.tokens = sequence.tokens
        num_read = len(self.automaton)  # a burst extends it too
        self.automaton.extend(self.tokens[num_read:])
        if self.prediction is not None:
            self.prediction.read(self.tokens[max(num_read, self._num_prompt) :])

    def answer(self) -> Seq[int]:
        """The answer with the end of its prompt."""
        return self.tokens[max(self._num_prompt - NUM_LEAD_TOKENS, 0) :]
