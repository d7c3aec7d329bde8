"""NgramTable: a static back-off n-gram table of what a model says, counted once on its own text.

A context is the last 0 to N - 1 tokens. For each context the table keeps the most useful of the tokens that followed
it, with discounted probabilities; what they leave of 1 goes to the next shorter context (interpolated absolute
discounting: Ney, Essen and Kneser, 1994). Which entries are kept under a cap of size is decided by how much they say
beyond the shorter context (weighted difference: Seymore and Rosenfeld, 1996).

As arrays: contexts are 32-bit hashes in ascending order, so a wrong context is taken for a known one about once in
20,000 look-ups of a table with 200,000 contexts, which costs a draft and nothing else; probabilities are 8-bit steps of
1/16 in their binary logarithm.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sakiyomi.errors import CheckpointError

Uint64s = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]

MAX_ENTRIES = 255
STEPS_PER_BIT = 16
MIX1, MIX2, MIX3 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MASK = (1 << 64) - 1
CONTEXT_BYTES, WEIGHT_BYTES = 5, 1
LEAST = 1e-6
"""Shorter contexts that would share less than this are not asked."""


@dataclass(frozen=True, eq=False)
class Continuations:
    """What may follow: ascending ids [K] and their probabilities [K], whose sum is at most 1."""

    ids: Ints
    probs: npt.NDArray[np.float64]


class NgramTable:
    """Answers what follows the last tokens of a text.

    Args:
        order: N, tokens of the longest n-gram, the predicted one included.
        keys: uint32 [C], ascending hashes of contexts.
        counts: uint8 [C], entries of each context.
        tokens: uint16 or uint32 [E], the entries' tokens, context by context, the most probable first.
        weights: uint8 [E], their probabilities as -16 log2.
    """

    def __init__(
        self,
        order: int,
        keys: npt.NDArray[np.uint32],
        counts: npt.NDArray[np.uint8],
        tokens: npt.NDArray[Any],
        weights: npt.NDArray[np.uint8],
    ) -> None:
        self.order = order
        self.keys, self.counts, self.tokens, self.weights = keys, counts, tokens, weights
        self._starts = np.concatenate([[0], np.cumsum(counts.astype(np.int64))])
        self._probs = np.exp2(-np.arange(256) / STEPS_PER_BIT)

    def __len__(self) -> int:
        """Number of entries."""
        return len(self.tokens)

    @property
    def num_contexts(self) -> int:
        return len(self.keys)

    def continue_text(self, tokens: Sequence[int]) -> Continuations:
        """What may follow a text, from its longest known context down to none."""
        left = 1.0
        ids: list[npt.NDArray[Any]] = []
        probs: list[npt.NDArray[np.float64]] = []
        for length in range(min(self.order - 1, len(tokens)), -1, -1):
            found = self._find(hash_context(tokens[len(tokens) - length :]))
            if found is None:
                continue
            entries = slice(self._starts[found], self._starts[found + 1])
            own = self._probs[self.weights[entries]]
            ids.append(self.tokens[entries])
            probs.append(own * left)
            left *= 1.0 - float(own.sum())
            if left < LEAST:
                break
        if not ids:
            return Continuations(np.zeros(0, np.int64), np.zeros(0))
        merged, where = np.unique(np.concatenate(ids), return_inverse=True)
        sums = np.bincount(where, np.concatenate(probs), len(merged)).astype(np.float64)
        return Continuations(merged.astype(np.int64), sums)

    def _find(self, key: int) -> int | None:
        index = int(np.searchsorted(self.keys, np.uint32(key)))
        return index if index < len(self.keys) and self.keys[index] == key else None

    # ------------------------------------------------------------------------------------------ as tensors

    def to_tensors(self) -> dict[str, npt.NDArray[Any]]:
        return {"keys": self.keys, "counts": self.counts, "tokens": self.tokens, "weights": self.weights}

    @classmethod
    def from_tensors(cls, order: int, tensors: Mapping[str, Any]) -> NgramTable:
        """The table of stored arrays.

        Raises:
            CheckpointError: arrays that are missing or do not belong together.
        """
        try:
            keys, counts, tokens, weights = (np.asarray(tensors[k]) for k in ("keys", "counts", "tokens", "weights"))
            is_whole = len(keys) == len(counts) and len(tokens) == len(weights) == int(counts.astype(np.int64).sum())
        except (KeyError, ValueError, TypeError) as error:
            raise CheckpointError(f"the table's arrays are incomplete ({error}); make it anew.") from error
        is_ascending = bool((np.diff(keys.astype(np.int64)) > 0).all())
        if not is_whole or not is_ascending or weights.dtype != np.uint8 or not 1 <= order <= 16:
            raise CheckpointError("the table's arrays do not belong together; make it anew.")
        return cls(order, keys.astype(np.uint32), counts, tokens, weights)


def hash_context(tokens: Iterable[int]) -> int:
    """The 32-bit hash of a context; that of none is 0."""
    state = 0
    for token in tokens:
        state = _mix(state ^ (token + 1))
    return state >> 32


def _mix(x: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    x = (x + MIX1) & MASK
    x = ((x ^ (x >> 30)) * MIX2) & MASK
    x = ((x ^ (x >> 27)) * MIX3) & MASK
    return x ^ (x >> 31)


def _mix_all(x: Uint64s) -> Uint64s:
    x = x + np.uint64(MIX1)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MIX2)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MIX3)
    return x ^ (x >> np.uint64(31))


def _pair(contexts: Uint64s, tokens: Ints) -> Uint64s:
    """Hashes of contexts with a token behind them."""
    # Tokens are hashed from elsewhere than in contexts, where the same hash would cancel.
    return _mix_all(contexts ^ _mix_all(tokens.astype(np.uint64) + np.uint64(1 << 40)))


# ---------------------------------------------------------------------------------------------- counting


@dataclass(eq=False)
class _Level:
    """The n-grams with contexts of one length, sorted by context and, within it, by count.

    Attributes:
        contexts: uint64 [E], hashes; shorter: uint64 [E], those of the contexts without their first token.
        tokens: int64 [E]; counts: int64 [E]; totals: int64 [E], of the context.
        own: float64 [E], discounted probabilities.
        is_kept: bool [E].
    """

    contexts: Uint64s
    shorter: Uint64s
    tokens: Ints
    counts: Ints
    totals: Ints
    own: npt.NDArray[np.float64]
    is_kept: npt.NDArray[np.bool_]


class TableCounter:
    """Counts n-grams over documents and builds a table of them.

    Args:
        order: N of the longest n-gram.
        vocab_size: V.
    """

    def __init__(self, order: int, vocab_size: int) -> None:
        self.order = order
        self.vocab_size = vocab_size
        self._contexts: list[list[Uint64s]] = [[] for _ in range(order)]
        self._labels: list[list[Ints]] = [[] for _ in range(order)]
        self._shorter: list[list[Uint64s]] = [[] for _ in range(order)]

    def add(
        self,
        tokens: npt.NDArray[np.integer[Any]],
        labels: npt.NDArray[np.integer[Any]],
        counts: npt.NDArray[np.bool_],
    ) -> None:
        """Take in a document.

        Args:
            tokens: [L].
            labels: [L], what follows each token in the model's opinion; below 0 where nothing does.
            counts: [L], whether the label counts.
        """
        wide = np.asarray(tokens).astype(np.uint64) + np.uint64(1)
        hashes: list[Uint64s] = []
        for length in range(min(self.order, len(wide) + 1)):
            state = np.zeros(len(wide) - max(length - 1, 0), np.uint64)
            for offset in range(length):
                state = _mix_all(state ^ wide[offset : len(wide) - length + 1 + offset])
            hashes.append(state)
            first = max(length - 1, 0)
            used = np.flatnonzero((np.asarray(labels)[first:] >= 0) & counts[first:])
            self._contexts[length].append(state[used])
            self._labels[length].append(np.asarray(labels)[first:][used].astype(np.int64))
            parent = hashes[length - 1][len(hashes[length - 1]) - len(state) :] if length else state
            self._shorter[length].append(parent[used])

    def build(self, max_bytes: int, min_count: int = 2) -> NgramTable:
        """The most useful table of at most `max_bytes`.

        Args:
            min_count: n-grams of three tokens and more that were seen less often are left out.
        """
        levels = [self._level(length, min_count if length >= 2 else 1) for length in range(self.order)]
        _keep_most_useful(levels, max_bytes, 2 if self.vocab_size <= 1 << 16 else 4, 1 / self.vocab_size)
        return self._assemble(levels)

    def _level(self, length: int, min_count: int) -> _Level:
        contexts = np.concatenate(self._contexts[length] or [np.zeros(0, np.uint64)])
        shorter = np.concatenate(self._shorter[length] or [np.zeros(0, np.uint64)])
        labels = np.concatenate(self._labels[length] or [np.zeros(0, np.int64)])
        pairs = _pair(contexts, labels)
        _, first, counts = np.unique(pairs, return_index=True, return_counts=True)
        contexts, shorter, labels = contexts[first], shorter[first], labels[first]
        order = np.lexsort((labels, -counts, contexts))
        contexts, shorter, labels, counts = contexts[order], shorter[order], labels[order], counts[order]
        starts = _starts_of_runs(contexts)
        totals = np.repeat(np.add.reduceat(counts, starts) if len(starts) else counts, _lengths(starts, len(counts)))
        rank = np.arange(len(counts)) - np.repeat(starts, _lengths(starts, len(counts)))
        own = np.maximum(counts - _discounts(counts), 0.0) / np.maximum(totals, 1)
        is_kept = (counts >= min_count) & (rank < MAX_ENTRIES) & (own >= 2.0 ** (-255 / STEPS_PER_BIT))
        return _Level(contexts, shorter, labels, counts.astype(np.int64), totals, own, is_kept)

    def _assemble(self, levels: Sequence[_Level]) -> NgramTable:
        keys = np.concatenate([level.contexts[level.is_kept] >> np.uint64(32) for level in levels]).astype(np.uint32)
        tokens = np.concatenate([level.tokens[level.is_kept] for level in levels])
        own = np.concatenate([level.own[level.is_kept] for level in levels])
        depth = np.concatenate([np.full(int(level.is_kept.sum()), n) for n, level in enumerate(levels)])
        order = np.lexsort((-own, depth, keys))
        keys, tokens, own, depth = keys[order], tokens[order], own[order], depth[order]
        # Where two contexts share a hash the shorter one stays: it is met more often.
        first = _starts_of_runs(keys)
        clashes = depth != np.repeat(depth[first], _lengths(first, len(keys)))
        keys, tokens, own = keys[~clashes], tokens[~clashes], own[~clashes]
        starts = _starts_of_runs(keys)
        counts = _lengths(starts, len(keys))
        cut = np.arange(len(keys)) - np.repeat(starts, counts) < MAX_ENTRIES
        weights = np.clip(np.round(-STEPS_PER_BIT * np.log2(own)), 0, 255).astype(np.uint8)
        dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32
        return NgramTable(
            self.order,
            keys[starts],
            np.minimum(counts, MAX_ENTRIES).astype(np.uint8),
            tokens[cut].astype(dtype),
            weights[cut],
        )


def _discounts(counts: Ints) -> npt.NDArray[np.float64]:
    """For n-grams seen once, twice, and more often what to take off (Chen and Goodman, 1998)."""
    seen = [int((counts == n).sum()) for n in range(1, 5)]
    if not all(seen):
        return np.full(len(counts), 0.5)
    ratio = seen[0] / (seen[0] + 2 * seen[1])
    amounts = [min(max(n - (n + 1) * ratio * seen[n] / seen[n - 1], 0.0), n - 0.1) for n in (1, 2, 3)]
    found: npt.NDArray[np.float64] = np.array(amounts)[np.minimum(counts, 3) - 1]
    return found


def _keep_most_useful(levels: Sequence[_Level], max_bytes: int, token_bytes: int, uniform: float) -> None:
    """Drop the entries that say least beyond the shorter context, until the rest fits."""
    gains: list[npt.NDArray[np.float64]] = []
    for length, level in enumerate(levels):
        below = _probabilities_below(levels[length - 1], level) if length else np.full(len(level.own), uniform)
        full = level.own + (1 - np.minimum(_kept_mass(level), 1.0)) * below
        gains.append(
            np.where(level.is_kept, level.counts * np.log(np.maximum(full, 1e-9) / np.maximum(below, 1e-9)), 0)
        )
    flat = np.concatenate([gain if len(gain) else np.zeros(0) for gain in gains])
    groups = np.concatenate([level.contexts + np.uint64(number) for number, level in enumerate(levels)])
    order = np.argsort(-flat, kind="stable")[: int((flat > 0).sum())]
    fitting = _count_fitting(groups[order], max_bytes, token_bytes + WEIGHT_BYTES)
    kept = np.zeros(len(flat), np.bool_)
    kept[order[:fitting]] = True
    first = 0
    for level in levels:
        level.is_kept &= kept[first : first + len(level.own)]
        first += len(level.own)


def _count_fitting(contexts: Uint64s, max_bytes: int, entry_bytes: int) -> int:
    """How many entries, from the first on, fit with the contexts that they need."""
    _, first = np.unique(contexts, return_index=True)
    sizes = np.full(len(contexts), entry_bytes, np.int64)
    sizes[first] += CONTEXT_BYTES
    return int(np.searchsorted(np.cumsum(sizes), max_bytes, side="right"))


def _kept_mass(level: _Level) -> npt.NDArray[np.float64]:
    """For each entry the probability that the kept entries of its context have together."""
    starts = _starts_of_runs(level.contexts)
    if not len(starts):
        return level.own
    return np.repeat(np.add.reduceat(level.own * level.is_kept, starts), _lengths(starts, len(level.own)))


def _probabilities_below(shorter: _Level, level: _Level) -> npt.NDArray[np.float64]:
    """For each entry of a level the probability of its token in the shorter context (that context's own part)."""
    known = _pair(shorter.contexts, shorter.tokens)
    wanted = _pair(level.shorter, level.tokens)
    order = np.argsort(known)
    where = np.minimum(np.searchsorted(known[order], wanted), max(len(known) - 1, 0))
    found = known[order][where] == wanted
    return np.where(found, shorter.own[order][where], 1e-6)


def _starts_of_runs(values: npt.NDArray[Any]) -> Ints:
    return np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]])) if len(values) else np.zeros(0, np.int64)


def _lengths(starts: Ints, total: int) -> Ints:
    return np.diff(np.append(starts, total))
