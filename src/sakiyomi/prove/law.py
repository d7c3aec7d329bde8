"""Is what a verifier emits distributed as the target says? A sequential test on the model's own next-token laws.

At a few fixed contexts answers of a few tokens are drawn again and again, by the real step with the real drafter, each
with a seed of its own. The law of each token given those before it is known exactly, from the target's own row. Half
of the stake is on one question over all draws: do tokens that the drafter over-rates come too often or too rarely?
The other half is spread over the beginnings of answers that are common enough, each with a test of its token's law
over cells of similar probability.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, log

import numpy as np
import numpy.typing as npt

from sakiyomi.decode import forget, step
from sakiyomi.models.toy import TokenCache
from sakiyomi.noise import derive_seed
from sakiyomi.params import SamplingParams
from sakiyomi.prove.memo import MemoModel
from sakiyomi.prove.sequential import CellTest, TiltTest, least_cell_deviation, least_tilt
from sakiyomi.sampling.distributions import Law, draft_law, law_of
from sakiyomi.tree import SAMPLED, Draft
from sakiyomi.types import Drafter, Sequence, Span, Verifier

ALPHA = 1e-3
POWER = 0.95
NUM_CELLS = 8
GOOD_ENTROPY = 1.2  # nats, of a law worth testing
MIN_PREFIX = 0.1  # probability of a beginning that has a test of its own
MAX_POINTS = 160  # of a curve
MAX_NODES = 512  # laws in memory

Prefix = tuple[int, ...]


@dataclass(frozen=True)
class Context:
    """A text at whose end answers are drawn.

    Attributes:
        budget: nodes of a draft at most.
        num_tokens: tokens of an answer.
    """

    name: str
    tokens: tuple[int, ...]
    num_prompt: int
    params: SamplingParams
    budget: int = 2
    num_tokens: int = 2


@dataclass(frozen=True, kw_only=True)
class PrefixResult:
    """What the test of one beginning of answers saw.

    Attributes:
        probability: of the beginning, under the target.
        probs, counts: of the cells, expected and seen.
        cells: what lies in each cell: its number of tokens, and the first one.
        least_deviation: the total variation over these cells that so many draws notice with probability POWER.
    """

    context: int
    prefix: Prefix
    probability: float
    probs: tuple[float, ...]
    counts: tuple[int, ...]
    cells: tuple[tuple[int, int], ...]
    log_e: float
    least_deviation: float | None


@dataclass(frozen=True, kw_only=True)
class LawResult:
    """One verifier under the test.

    Attributes:
        error: what is known to be wrong with it, a control; None for the verifier that is to be proven.
        log_e: the largest logarithm of the e-value at any moment; rejected where it reaches log(1 / ALPHA).
        tilt_log_e: of the question over all draws, at the end.
        curve: (draws so far, logarithm of the e-value).
        least_tilt: how much more often than it should a token that the drafter over-rates would have to come, as a
            probability, to be noticed with probability POWER.
        first_error: an emitted token that the target gives probability 0, or None.
    """

    name: str
    error: str | None
    num_draws: int
    num_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    log_e: float
    tilt_log_e: float
    curve: tuple[tuple[int, float], ...]
    prefixes: tuple[PrefixResult, ...]
    least_tilt: float | None
    first_error: str | None = None

    @property
    def is_rejected(self) -> bool:
        return self.log_e >= log(1 / ALPHA)

    @property
    def least_deviation(self) -> float | None:
        """The total variation of the first token's law that would be noticed at any single context."""
        found = [result.least_deviation for result in self.prefixes if not result.prefix]
        return max((value for value in found if value is not None), default=None)


class Bench:
    """Contexts with the target's laws behind them, and what a drafter over-rates there."""

    def __init__(self, model: MemoModel, drafter: Drafter, contexts: Seq[Context]) -> None:
        self.model = model
        self.drafter = drafter
        self.contexts = contexts
        self._nodes: OrderedDict[tuple[int, Prefix], _Node] = OrderedDict()
        self._seen: dict[int, Sequence] = {}

    def test(
        self,
        verifier: Verifier,
        num_draws: int,
        seed: int,
        *,
        name: str,
        error: str | None = None,
        report: Callable[[int], None] = lambda done: None,
    ) -> LawResult:
        """Draw and test, until the verifier is rejected or there are enough draws.

        Args:
            error: what is known to be wrong with the verifier, a control.
            report: called with the number of draws so far.
        """
        run = _Run(self, verifier, seed)
        while run.num_draws < num_draws and not run.is_rejected:
            run.draw()
            report(run.num_draws)
        return run.result(name, error)

    @cached_property
    def strata(self) -> list[tuple[int, Prefix, float]]:
        """The beginnings of answers that have a test of their own: (context, beginning, its probability)."""
        return [stratum for index in range(len(self.contexts)) for stratum in self._find_strata(index)]

    def node(self, index: int, prefix: Prefix) -> _Node:
        """The law behind a context and a beginning of an answer."""
        key = (index, prefix)
        if key not in self._nodes:
            sequence = self.sequence(index, prefix)
            law = law_of(self.model.row(tuple(sequence.tokens)), sequence.history())
            self._nodes[key] = _Node.of(law, self._guess(sequence, law.vocab_size))
            if len(self._nodes) > MAX_NODES:
                self._nodes.popitem(last=False)
        self._nodes.move_to_end(key)
        return self._nodes[key]

    def sequence(self, index: int, prefix: Prefix = (), seed: int = 0) -> Sequence:
        context = self.contexts[index]
        tokens = [*context.tokens, *prefix]
        # Without end ids: answers go on behind them.
        sequence = Sequence(str(index), tokens, context.num_prompt, context.params, seed, TokenCache(tokens[:-1]))
        if self.drafter.taps:
            self._show(sequence, index)
        return sequence

    def _show(self, sequence: Sequence, index: int) -> None:
        """Let a drafter with taps see the committed tokens, those of the context once for all draws."""
        context = self.contexts[index].tokens
        if index not in self._seen:
            first = self._seen[index] = replace(sequence, tokens=list(context), cache=TokenCache(context[:-1]))
            self._observe(first, 0)
            self.drafter.propose([first], [1])  # what waits to be computed is computed before it is copied
        sequence.memo = self.drafter.fork(self._seen[index])
        self._observe(sequence, 0 if sequence.memo is None else len(context) - 1)

    def _observe(self, sequence: Sequence, start: int) -> None:
        known = tuple(sequence.tokens[:-1])
        if start == len(known):
            return
        cached, new = known[:start], known[start:]
        span = Span(sequence.cache, new, range(-1, len(new) - 1), (), self.drafter.taps)
        branches = [new[: row + 1] for row in range(len(new))]
        self.drafter.observe(sequence, start, new, self.model.taps(cached, branches, span))

    def _find_strata(self, index: int) -> list[tuple[int, Prefix, float]]:
        found: list[tuple[int, Prefix, float]] = []
        level: list[tuple[Prefix, float]] = [((), 1.0)]
        for _ in range(self.contexts[index].num_tokens):
            found += [(index, prefix, p) for prefix, p in level]
            following: list[tuple[Prefix, float]] = []
            for prefix, p in level:
                tokens = self.node(index, prefix).common
                following += [((*prefix, token), p * q) for token, q in tokens if p * q >= MIN_PREFIX]
            level = following
        return [stratum for stratum in found if self.node(index, stratum[1]).probs.size > 1]

    def _guess(self, sequence: Sequence, vocab_size: int) -> Law | None:
        """The drafter's law of the next token, a function of the text alone; None where it guesses nothing."""
        draft = self.drafter.propose([sequence], [1])[0].trim(1, 1)
        forget(self.drafter, sequence)
        return _root_law(draft, vocab_size)


def _root_law(draft: Draft, vocab_size: int) -> Law | None:
    if not draft.tokens:
        return None
    return draft_law(draft, 0, vocab_size) if draft.drawn in SAMPLED else Law.one_hot(draft.tokens[0], vocab_size)


@dataclass(frozen=True, eq=False)
class _Node:
    """The law behind one text, cut into cells.

    Attributes:
        cell_of: the cell of each id, -1 where the law gives it probability 0.
        probs: of the cells.
        cells: number of tokens and most probable token of each.
        over_rated: whether the drafter gives an id more than the target does; None where it guesses nothing.
        over: the probability of these ids.
        entropy: of the law, in nats.
        common: the ids that may begin a tested text, with their probabilities.
    """

    cell_of: npt.NDArray[np.int16]
    probs: npt.NDArray[np.float64]
    cells: tuple[tuple[int, int], ...]
    over_rated: npt.NDArray[np.bool_] | None
    over: float
    entropy: float
    common: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, law: Law, guess: Law | None) -> _Node:
        order = np.argsort(-law.probs, kind="stable")
        probs = law.probs[order]
        ids = law.ids[order][probs > 0]
        probs = probs[probs > 0]
        labels = _label(probs)
        cell_of = np.full(law.vocab_size, -1, np.int16)
        cell_of[ids] = labels
        sums = np.bincount(labels, probs)
        firsts = [int(np.searchsorted(labels, cell)) for cell in range(sums.size)]
        sizes = np.bincount(labels)
        over_rated = None if guess is None else guess.row() > law.row()
        return cls(
            cell_of,
            sums / sums.sum(),
            tuple((int(size), int(ids[first])) for size, first in zip(sizes, firsts, strict=True)),
            over_rated,
            0.0 if over_rated is None else float(law.row()[over_rated].sum()),
            law.entropy(),
            tuple((int(ids[i]), float(probs[i])) for i in range(min(ids.size, 10)) if probs[i] >= MIN_PREFIX),
        )


def _label(probs: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Cells for descending probabilities: a new one begins when the last has 1 / NUM_CELLS; a small rest joins it."""
    labels = np.zeros(probs.size, np.int64)
    cell, start, total, left = 0, 0, 0.0, float(probs.sum())
    for end in range(1, probs.size + 1):
        total += float(probs[end - 1])
        if total >= 1 / NUM_CELLS and left - total >= 0.25 / NUM_CELLS:
            labels[start:end] = cell
            cell, start, left, total = cell + 1, end, left - total, 0.0
    labels[start:] = cell
    return labels


@dataclass
class _Run:
    bench: Bench
    verifier: Verifier
    seed: int
    num_draws: int = 0
    num_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    highest: float = 0.0
    first_error: str | None = None
    tilt: TiltTest = field(default_factory=TiltTest)
    curve: list[tuple[int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tests = {
            (index, prefix): CellTest(self.bench.node(index, prefix).probs) for index, prefix, _ in self.bench.strata
        }

    @property
    def log_e(self) -> float:
        """Half of the stake on the tilt, the rest in equal parts on the beginnings."""
        logs = [test.log_e for test in self.tests.values()]
        if self.first_error is not None:
            return inf
        parts = np.array([self.tilt.log_e - log(2), *(value - log(2 * len(logs)) for value in logs)])
        top = float(parts.max())
        rest = 0.5 if not logs else 0.0  # a stake that nothing is bet on stays what it was
        return inf if top == inf else top + log(float(np.exp(parts - top).sum()) + rest * float(np.exp(-top)))

    @property
    def is_rejected(self) -> bool:
        return self.highest >= log(1 / ALPHA)

    def draw(self) -> None:
        """One answer at the next context in turn."""
        index = self.num_draws % len(self.bench.contexts)
        context = self.bench.contexts[index]
        self.num_draws += 1
        sequence = self.bench.sequence(index, seed=derive_seed(self.seed, self.num_draws))
        while len(sequence.tokens) < len(context.tokens) + context.num_tokens:
            done = step(self.bench.model, self.bench.drafter, self.verifier, [sequence], [context.budget])[0]
            self.num_draft_tokens += done.num_draft
            self.num_accepted_tokens += done.num_accepted
        forget(self.bench.drafter, sequence)
        answer = tuple(sequence.tokens[len(context.tokens) :][: context.num_tokens])
        for length, token in enumerate(answer):
            self._judge(index, answer[:length], token)
            if self.first_error is not None:
                break
        log_e = self.log_e
        self.highest = max(self.highest, log_e)
        self.curve.append((self.num_draws, log_e))

    def _judge(self, index: int, prefix: Prefix, token: int) -> None:
        node = self.bench.node(index, prefix)
        cell = int(node.cell_of[token])
        self.num_tokens += 1
        if cell < 0:
            name = self.bench.contexts[index].name
            self.first_error = f"token {token} behind {prefix} at {name}, which the target gives probability 0"
            return
        if (index, prefix) in self.tests:
            self.tests[index, prefix].add(cell)
        if node.over_rated is not None and 0 < node.over < 1:
            self.tilt.add(bool(node.over_rated[token]), node.over)

    def result(self, name: str, error: str | None) -> LawResult:
        # What a run could have noticed is of interest only where it noticed nothing and should have.
        has_power = error is None and not self.is_rejected
        tilts = self.tilt.probs
        return LawResult(
            name=name,
            error=error,
            num_draws=self.num_draws,
            num_tokens=self.num_tokens,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            log_e=self.highest,
            tilt_log_e=self.tilt.log_e,
            curve=thin(self.curve),
            prefixes=tuple(self._prefix_result(*stratum, has_power) for stratum in self.bench.strata),
            least_tilt=least_tilt(tilts, log(2 / ALPHA), POWER) if has_power and tilts else None,
            first_error=self.first_error,
        )

    def _prefix_result(self, index: int, prefix: Prefix, probability: float, has_power: bool) -> PrefixResult:
        test = self.tests[index, prefix]
        num_draws = int(test.counts.sum())
        threshold = log(2 * len(self.tests) / ALPHA)
        return PrefixResult(
            context=index,
            prefix=prefix,
            probability=probability,
            probs=tuple(test.probs.tolist()),
            counts=tuple(int(count) for count in test.counts),
            cells=self.bench.node(index, prefix).cells,
            log_e=test.log_e,
            least_deviation=least_cell_deviation(test.probs, num_draws, threshold, POWER) if has_power else None,
        )


def thin(curve: Seq[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """At most MAX_POINTS points: of each run of draws the one with the largest value, and the last."""
    size = -(-len(curve) // MAX_POINTS)
    if size == 0:
        return ()
    best = [max(curve[i : i + size], key=lambda point: point[1]) for i in range(0, len(curve), size)]
    return (*best, curve[-1]) if best[-1] != curve[-1] else tuple(best)


# ---------------------------------------------------------------------------------------------- contexts


def find_contexts(
    model: MemoModel,
    drafter: Drafter,
    texts: Seq[tuple[Seq[int], Seq[int]]],
    make: Callable[[tuple[int, ...], int], Context],
    count: int,
) -> list[Context]:
    """Places in answers where the drafter guesses and the target hesitates, spread over the answers.

    A law of very many tokens costs a pass for each of them and shows little more than one of a few.

    Args:
        texts: (ids of the prompt, ids of its answer).
        make: from tokens and the length of the prompt to a context.
    """
    ranked = [
        _rank_places(model, drafter, [make((*prompt, *answer[:length]), len(prompt)) for length in range(len(answer))])
        for prompt, answer in texts
    ]
    turns = range(max((len(places) for places in ranked), default=0))
    found = (places[turn] for turn in turns for places in ranked if turn < len(places))
    return list({context.tokens: context for context in found}.values())[:count]  # answers may begin alike


def _rank_places(model: MemoModel, drafter: Drafter, places: Seq[Context]) -> list[Context]:
    probe = Bench(model, drafter, places)
    scored = []
    for index, place in enumerate(places):
        node = probe.node(index, ())
        if node.over_rated is not None and node.probs.size > 1:
            scored.append((abs(node.entropy - GOOD_ENTROPY), index, place))
    return [place for _, _, place in sorted(scored, key=lambda entry: entry[:2])]
