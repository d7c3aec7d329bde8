"""The bench: what is emitted with which probability, by trying every outcome of every draw. Nothing is sampled.

The code under test is the real one, from `decode.step` down: drafters, verifiers, caches of a toy. Only chance is
replaced. Each key of the noise is a uniform number of which a run knows no more than an interval; a question about it
(is it below p? into which part of a law does it fall?) splits the interval, and every part is followed in a run of its
own. So noise that is used twice is used twice here too.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from sakiyomi.decode import prefill, step
from sakiyomi.models.toy import ToyModel
from sakiyomi.noise import PURPOSE_DRAFT, Randomness
from sakiyomi.params import SamplingParams
from sakiyomi.sampling.distributions import law_of
from sakiyomi.tree import ROOT, Draft, TreeBuilder
from sakiyomi.types import Drafter, History, Model, Output, Sequence, Span, Verifier

T = TypeVar("T")
Tokens = tuple[int, ...]
Laws = dict[Tokens, float]
MakeDrafter = Callable[[Randomness], Drafter]
MakeVerifier = Callable[[Randomness], Verifier]

PROMPT = (0, 1)
WARM = SamplingParams(temperature=1.0, max_tokens=None, ignore_eos=True)
EXACT = 1e-12
NOTHING = 1e-15  # parts of an interval shorter than this are rounding


# ---------------------------------------------------------------------------------------------- chance


class Enumerator:
    """A source of randomness that goes through every outcome."""

    def __init__(self) -> None:
        self._turns: list[tuple[int, int]] = []
        """At each fork of the run before: the branch taken, and how many there are."""

    def outcomes(self, run: Callable[[], T]) -> Iterator[tuple[float, T]]:
        """Results of `run` with their probabilities; `run` starts anew each time."""
        while True:
            self._fork, self._probability, self._known = 0, 1.0, {}
            result = run()
            yield self._probability, result
            while self._turns and self._turns[-1][0] + 1 == self._turns[-1][1]:
                self._turns.pop()
            if not self._turns:
                return
            taken, count = self._turns[-1]
            self._turns[-1] = taken + 1, count

    def flip(self, key: Any, p: float, q: float = 1.0) -> bool:
        chance = min(1.0, p / q) if q > 0 else float(p > 0)
        return self._ask(key, [chance, 1.0 - chance]) == 0

    def draw(self, key: Any, ids: npt.NDArray[Any], probs: npt.NDArray[Any], count: int = 1) -> list[int]:
        left = np.array(probs, np.float64)
        drawn: list[int] = []
        for number in range(count):
            if not left.sum() > 0:
                break
            index = self._ask((key, number) if number else key, list(left / left.sum()))
            left[index] = 0
            drawn.append(int(ids[index]))
        return drawn

    def _ask(self, key: Any, chances: Seq[float]) -> int:
        """In which of the parts of [0, 1) the number of `key` lies."""
        low, high = self._known.get(key, (0.0, 1.0))
        edges = [0.0, *itertools.accumulate(chances)]
        edges[-1] = 1.0
        parts = [(i, max(a, low), min(b, high)) for i, (a, b) in enumerate(itertools.pairwise(edges))]
        parts = [part for part in parts if part[2] - part[1] > NOTHING]
        if self._fork == len(self._turns):
            self._turns.append((0, len(parts)))
        index, low_part, high_part = parts[self._turns[self._fork][0]]
        self._fork += 1
        self._probability *= (high_part - low_part) / (high - low)
        self._known[key] = low_part, high_part
        return index


@dataclass(frozen=True)
class Rekeyed:
    """Randomness whose keys are changed: the planted errors of noise."""

    source: Randomness
    change: Callable[[Any], Any]

    def flip(self, key: Any, p: float, q: float = 1.0) -> bool:
        return self.source.flip(self.change(key), p, q)

    def draw(self, key: Any, ids: npt.NDArray[Any], probs: npt.NDArray[Any], count: int = 1) -> list[int]:
        return self.source.draw(self.change(key), ids, probs, count)


# ---------------------------------------------------------------------------------------------- models


class Table:
    """Random laws, another for each prefix; `num_zeros` of the ids have none of the probability."""

    def __init__(self, vocab_size: int, seed: int, num_zeros: int = 0) -> None:
        self.vocab_size = vocab_size
        self._seed = seed
        self._num_zeros = num_zeros
        self._rows: dict[Tokens, npt.NDArray[np.float32]] = {}

    def __call__(self, tokens: Seq[int]) -> npt.NDArray[np.float32]:
        key = tuple(tokens)
        if key not in self._rows:
            rng = np.random.default_rng((self._seed, 7, *key))
            row = rng.dirichlet(np.ones(self.vocab_size)) + 1e-3
            row[rng.permutation(self.vocab_size)[: self._num_zeros]] = 0
            with np.errstate(divide="ignore"):
                self._rows[key] = np.log(row).astype(np.float32)
        return self._rows[key]


class ConstantTable(Table):
    """The same law after every prefix."""

    def __init__(self, probs: Seq[float]) -> None:
        super().__init__(len(probs), 0)
        self._row = np.log(np.asarray(probs)).astype(np.float32)

    def __call__(self, tokens: Seq[int]) -> npt.NDArray[np.float32]:
        return self._row


class ChanceModel(Model):
    """A toy that chooses with the bench's chance, keyed by position as the real noise is."""

    def __init__(self, table: Table, randomness: Randomness) -> None:
        self._model = ToyModel(table, table.vocab_size)
        self._randomness = randomness
        self.info = self._model.info

    def new_cache(self) -> Any:
        return self._model.new_cache()

    def forward(self, spans: Seq[Span]) -> list[Output]:
        return [ChanceOutput(output, self._randomness) for output in self._model.forward(spans)]


class ChanceOutput:
    def __init__(self, output: Output, randomness: Randomness) -> None:
        self._randomness = randomness
        self.taps = output.taps
        self.row = output.row
        self.argmax = output.argmax

    def choose(self, i: int, history: History) -> int:
        law = law_of(self.row(i), history)
        return self._randomness.draw(("match", history.position), law.ids, law.probs)[0]


# ---------------------------------------------------------------------------------------------- drafters


class TreeDrafter(Drafter):
    """Draws trees of a fixed shape from a table: shape[d] draws below each node of depth d.

    Args:
        kind: "independent", "without_replacement", or "fixed" for the most probable tokens.
    """

    def __init__(self, table: Table, shape: Seq[int], kind: str, randomness: Randomness) -> None:
        self.table = table
        self.shape = shape
        self.kind = kind
        self.randomness = randomness

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        return [self.draw(sequence) for sequence in sequences]

    def draw(self, sequence: Sequence) -> Draft:
        tree = TreeBuilder()
        laws: list[npt.NDArray[np.float64]] = []
        draws: list[int] = []
        level = [ROOT]
        for count in self.shape:
            below = []
            for node in level:
                path = tree.path_tokens(node)
                law = law_of(self.table([*sequence.tokens, *path]), sequence.history(path)).row()
                children: dict[int, int] = {}
                for token in self.draw_tokens(sequence, node, law, count):
                    if token not in children:
                        children[token] = len(tree)
                        tree.add(node, [token], [0.0])
                        laws.append(law)
                    draws.append(children[token])
                below += children.values()
            level = below
        return self.declare(tree.build(), laws, tuple(draws))

    def draw_tokens(self, sequence: Sequence, node: int, law: npt.NDArray[np.float64], count: int) -> list[int]:
        key = sequence.noise_key(node, PURPOSE_DRAFT)
        ids = np.arange(law.size)
        if self.kind == "fixed":
            return [int(token) for token in np.argsort(-law, kind="stable")[:count]]
        if self.kind == "without_replacement":
            return self.randomness.draw(key, ids, law, count)
        return [self.randomness.draw((key, "draw", i) if i else key, ids, law)[0] for i in range(count)]

    def declare(self, draft: Draft, laws: list[npt.NDArray[np.float64]], draws: Tokens) -> Draft:
        if self.kind == "fixed":
            return draft
        return replace(draft, drawn=self.kind, probs=laws, draws=draws)


# ---------------------------------------------------------------------------------------------- laws


def emitted_law(
    table: Table,
    make_drafter: MakeDrafter,
    make_verifier: MakeVerifier,
    num_tokens: int,
    *,
    num_steps: int = 1,
    params: SamplingParams = WARM,
    new_sequence: Callable[..., Sequence] = Sequence,
    budget: int = 64,
) -> Laws:
    """The law of the first `num_tokens` tokens after some steps; what they leave open, the target fills in."""
    enumerator = Enumerator()

    def run() -> Tokens:
        model = ChanceModel(table, enumerator)
        drafter, verifier = make_drafter(enumerator), make_verifier(enumerator)
        sequence = new_sequence("0", list(PROMPT), len(PROMPT), params, 5, model.new_cache())
        prefill(model, drafter, sequence)
        for _ in range(num_steps):
            if sequence.num_new < num_tokens and sequence.finish_reason is None:
                step(model, drafter, verifier, [sequence], [budget])
        return tuple(sequence.tokens[len(PROMPT) :])

    law: Laws = defaultdict(float)
    total = 0.0
    for probability, tokens in enumerator.outcomes(run):
        total += probability
        for rest, share in target_law(table, num_tokens, params, tokens[:num_tokens]).items():
            law[rest] += probability * share
    assert abs(total - 1) < 1e-9
    return law


def target_law(table: Table, num_tokens: int, params: SamplingParams = WARM, start: Tokens = ()) -> Laws:
    """The law of plain decoding for the first `num_tokens` tokens, given that they start with `start`."""
    laws: Laws = {start: 1.0}
    for _ in range(num_tokens - len(start)):
        laws = {
            (*tokens, token): share * chance
            for tokens, share in laws.items()
            for token, chance in enumerate(_row(table, tokens, params))
            if chance > 0
        }
    return laws


def _row(table: Table, tokens: Tokens, params: SamplingParams) -> npt.NDArray[np.float64]:
    history = History([*PROMPT, *tokens], len(PROMPT), params, 0)
    return law_of(table([*PROMPT, *tokens]), history).row()


def total_variation(a: Laws, b: Laws) -> float:
    return sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in {*a, *b}) / 2


def deviation(table: Table, *args: Any, num_tokens: int, params: SamplingParams = WARM, **more: Any) -> float:
    """Total variation between what is emitted and the target's law."""
    law = emitted_law(table, *args, num_tokens, params=params, **more)
    return total_variation(law, target_law(table, num_tokens, params))
