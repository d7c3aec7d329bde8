"""lookahead: the target guesses far positions itself, in rows that run beside those of the check.

Lookahead decoding (Fu, Bailis, Stoica and Zhang, 2024) after Jacobi decoding (Santilli et al., 2023). A window of W
columns and N - 1 levels holds guesses: column j of level l one for the position l + j behind the last committed token,
which is column 0 of level 0. Each step feeds the window as probes, a tree in which column j of a level hangs below
column j of the level above, and level 0 is a chain. The most probable tokens behind the last level complete one n-gram
per column for the pool, and become the last level of the next window. What the pool has for the last committed token
is the draft. No second model, no training; more rows in each pass instead.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from sakiyomi.plugins import MAX_DRAFT_TOKENS, check_bounds
from sakiyomi.tree import ROOT, Draft, Probes
from sakiyomi.types import Drafter, DrafterContext, Sequence

Ngram = tuple[int, ...]

MAX_SIZE = 64


class LookaheadDrafter(Drafter):
    """Drafts n-grams that the target has guessed in earlier steps."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options of `lookahead`. A step feeds up to (window + guesses) * (ngram - 1) rows.

        Args:
            window: columns of the window, W.
            ngram: length of the n-grams, N; the window has N - 1 levels.
            guesses: n-grams of the pool that are checked in a step at most, G; as many are kept for each first token.
            from_text: put the n-grams of prompt and answer into the pool as well, as prompt lookup does.
        """

        window: int = 5
        ngram: int = 4
        guesses: int = 5
        from_text: bool = True

        def __post_init__(self) -> None:
            check_bounds("window", self.window, 1, MAX_SIZE)
            check_bounds("ngram", self.ngram, 3, MAX_SIZE)
            check_bounds("guesses", self.guesses, 1, MAX_SIZE)
            rows = (self.window + self.guesses) * (self.ngram - 1)
            check_bounds("(window + guesses) * (ngram - 1)", rows, 1, MAX_DRAFT_TOKENS)

    def __init__(self, config: Config | None = None, context: DrafterContext | None = None) -> None:
        self.config = config or self.Config()

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        return [self._propose(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]

    def observe_probes(self, sequence: Sequence, probes: Probes, tokens: Seq[int]) -> None:
        memo = sequence.memo
        if isinstance(memo, _Memo) and memo.window.probes is probes:
            memo.pool.add_all(memo.window.advance(tokens, sequence.end_ids))

    def _propose(self, sequence: Sequence, budget: int) -> Draft:
        if budget <= 0:
            return Draft.empty()
        memo = sequence.memo
        if not isinstance(memo, _Memo):
            config = self.config
            pool = Pool(config.ngram, config.guesses)
            memo = sequence.memo = _Memo(Window(config.window, config.ngram, sequence.tokens), pool)
        if self.config.from_text:
            memo.read(sequence.tokens)
        probes: Probes | None = memo.window.probe(sequence.tokens[-1])
        room = budget - len(probes or ())
        if room < 0:
            # Where the whole window finds no room, what the pool has is still worth a check.
            probes, room = None, budget
        guesses = Draft.from_paths(memo.pool.find(sequence.tokens[-1])).trim(room, room)
        return replace(guesses, probes=probes)


@dataclass
class _Memo:
    """What the drafter keeps for a sequence."""

    window: Window
    pool: Pool
    num_read: int = 0

    def read(self, tokens: Seq[int]) -> None:
        """Put the n-grams of the text into the pool that are new since the last call."""
        size = self.pool.ngram
        for start in range(self.num_read, len(tokens) - size + 1):
            self.pool.add(tuple(tokens[start : start + size]))
        self.num_read = max(self.num_read, len(tokens) - size + 1)


@dataclass
class Pool:
    """For each first token the n-grams that began with it: the `guesses` latest, the latest last."""

    ngram: int
    guesses: int
    _by_first: dict[int, dict[Ngram, None]] = field(default_factory=dict)

    def add_all(self, ngrams: Seq[Ngram]) -> None:
        for ngram in ngrams:
            self.add(ngram)

    def add(self, ngram: Ngram) -> None:
        known = self._by_first.setdefault(ngram[0], {})
        known.pop(ngram[1:], None)
        known[ngram[1:]] = None
        if len(known) > self.guesses:
            del known[next(iter(known))]

    def find(self, first: int) -> list[Ngram]:
        """What followed `first`, the latest first."""
        return list(reversed(self._by_first.get(first, {})))


class Window:
    """The levels of guesses. It begins with tokens of the text in level 0 alone, and gains a level with each step.

    Args:
        tokens: the text so far, at least one token.
    """

    def __init__(self, width: int, ngram: int, tokens: Seq[int]) -> None:
        self._num_levels = ngram - 1
        # What the window guesses at random decides what is drafted, and so the speed, but no token of the answer.
        self._random = random.Random(0)
        self._tokens = list(tokens)
        first = self._random.choices(self._tokens, k=width + ngram - 3)
        self.levels = [first]
        """Level 0 without its column 0, the last committed token; then the others whole."""
        self.root = ROOT
        self.probes: Probes | None = None

    def probe(self, root: int) -> Probes | None:
        """The window as rows below the last committed token `root`."""
        tokens: list[int] = []
        parents: list[int] = []
        above: list[int] = []  # rows of the level above, by column
        for level, guesses in enumerate(self.levels):
            rows = range(len(tokens), len(tokens) + len(guesses))
            parents += [ROOT, *rows[:-1]] if level == 0 and guesses else above[: len(guesses)]
            tokens += guesses
            above = [ROOT, *rows] if level == 0 else [*rows]
        asked = tuple(row for row in above if row != ROOT)
        self.root = root
        self.probes = Probes(tuple(tokens), tuple(parents), asked) if asked else None
        return self.probes

    def advance(self, answers: Seq[int], end_ids: frozenset[int]) -> list[Ngram]:
        """Take in the most probable tokens behind the last level and move on by one position.

        Returns:
            The n-grams that they complete; none while the window is not filled.
        """
        self.probes = None
        ends = [token if token not in end_ids else self._random.choice(self._tokens) for token in answers]
        if len(self.levels) < self._num_levels:
            # A column goes in front, since the position moves on; the answers begin behind it.
            if len(self.levels) > 1:
                ends = ends[1:]
            self.levels = [self.levels[0][1:], *(level[1:] for level in self.levels[1:]), ends]
            return []
        columns = zip([self.root, *self.levels[0]], *self.levels[1:], answers, strict=True)
        ngrams = [ngram for ngram in columns if end_ids.isdisjoint(ngram[:-1])]
        self.levels = [self.levels[1][1:], *self.levels[2:], ends]
        return ngrams
