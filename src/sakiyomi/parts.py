"""What drafters that are made of drafters share: each part sees the sequences with its own memo and its own taps."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from sakiyomi.tree import Draft, Probes
from sakiyomi.types import Array, BurstSource, Drafter, Sequence


class PartsDrafter(Drafter):
    """Passes what was committed on to every part. `propose` is left to the derived class."""

    def __init__(self, parts: Seq[Drafter], hidden_size: int) -> None:
        self.parts = list(parts)
        self.taps = tuple(sorted({tap for part in self.parts for tap in part.taps}))
        self.needs_all_taps = any(part.needs_all_taps for part in self.parts)
        self.reads_prediction = any(part.reads_prediction for part in self.parts)
        self._hidden_size = hidden_size

    def ask(self, index: int, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        """The drafts of one part."""
        with self._lend_memos(index, sequences):
            return self.parts[index].propose(sequences, budgets)

    def ask_burst_source(self, index: int, sequence: Sequence) -> BurstSource | None:
        """What drafts as one part does within a burst, whose taps are those of all parts."""
        part = self.parts[index]
        if part.taps and part.taps != self.taps:
            return None
        with self._lend_memos(index, [sequence]):
            return part.burst_source(sequence)

    def sources(self) -> Seq[Drafter]:
        return [_Part(self, index) for index in range(len(self.parts))]

    def observe(self, sequence: Sequence, start: int, tokens: Seq[int], taps: Array | None) -> None:
        for index, part in enumerate(self.parts):
            with self._lend_memos(index, [sequence]):
                part.observe(sequence, start, tokens, self._taps_of(part, taps))

    def observe_probes(self, sequence: Sequence, probes: Probes, tokens: Seq[int]) -> None:
        for index, part in enumerate(self.parts):
            with self._lend_memos(index, [sequence]):
                part.observe_probes(sequence, probes, tokens)

    def rewind(self, sequence: Sequence, length: int) -> None:
        for index, part in enumerate(self.parts):
            with self._lend_memos(index, [sequence]):
                part.rewind(sequence, length)

    def forget(self, sequence: Sequence) -> None:
        for index, part in enumerate(self.parts):
            with self._lend_memos(index, [sequence]):
                part.forget(sequence)
        sequence.memo = None

    def _lend_memos(self, index: int, sequences: Seq[Sequence]) -> _Loan:
        """Let the sequences carry the memos of one part."""
        return _Loan(index, sequences, [self._memos(sequence) for sequence in sequences])

    def _memos(self, sequence: Sequence) -> _Memos:
        if not isinstance(sequence.memo, _Memos):
            sequence.memo = _Memos([None] * len(self.parts))
        return sequence.memo

    def _taps_of(self, part: Drafter, taps: Array | None) -> Array | None:
        """A part's own columns of the taps."""
        if taps is None or not part.taps or part.taps == self.taps:
            return taps if part.taps else None
        size = self._hidden_size
        starts = [self.taps.index(tap) * size for tap in part.taps]
        return taps[:, [column for start in starts for column in range(start, start + size)]]


@dataclass
class _Memos:
    parts: list[Any]


class _Loan:
    """Sequences that carry the memos of one part; a class, since a generator takes longer to enter and leave."""

    __slots__ = ("_index", "_memos", "_sequences")

    def __init__(self, index: int, sequences: Seq[Sequence], memos: list[_Memos]) -> None:
        self._index, self._sequences, self._memos = index, sequences, memos

    def __enter__(self) -> None:
        for sequence, own in zip(self._sequences, self._memos, strict=True):
            sequence.memo = own.parts[self._index]

    def __exit__(self, *_: object) -> None:
        for sequence, own in zip(self._sequences, self._memos, strict=True):
            own.parts[self._index] = sequence.memo
            sequence.memo = own


class _Part(Drafter):
    """One part, asked apart from the others."""

    def __init__(self, whole: PartsDrafter, index: int) -> None:
        self._whole = whole
        self._index = index

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        return self._whole.ask(self._index, sequences, budgets)

    def burst_source(self, sequence: Sequence) -> BurstSource | None:
        return self._whole.ask_burst_source(self._index, sequence)
