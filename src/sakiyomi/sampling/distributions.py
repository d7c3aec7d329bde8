"""The law of a row: what a token is drawn from, as probabilities. Rules that keep the distribution are written in it.

Conventions: p is the target's law, q the law a drafted token was drawn from (the names of Leviathan et al., 2023).
The law of a row is the softmax of the scores of sampling/choose.py, so that both decide by the same filters; at
temperature 0 it is one-hot. Everything is float64.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sakiyomi.errors import ParameterError
from sakiyomi.noise import PURPOSE_ACCEPT, PURPOSE_CORRECT, NoiseKey, Randomness
from sakiyomi.sampling.choose import Float32s, Ids, choose, race, subtract, toss, weigh
from sakiyomi.tree import Draft
from sakiyomi.types import DrawMode, History, Lossless, Output, Sequence, Verdict, Verifier

Float64s = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Law:
    """A law over token ids.

    Attributes:
        ids: ascending ids [K]; all others have probability 0.
        probs: their probabilities [K], sum 1; some may be 0.
        vocab_size: V.
    """

    ids: Ids
    probs: Float64s
    vocab_size: int

    @classmethod
    def one_hot(cls, token: int, vocab_size: int) -> Law:
        """The law of what is certain."""
        return cls(np.array([token]), np.ones(1), vocab_size)

    def probability(self, token: int) -> float:
        """The probability of an id."""
        index = int(self.ids.searchsorted(token))
        return float(self.probs[index]) if index < self.ids.size and self.ids[index] == token else 0.0

    def at(self, ids: Ids) -> Float64s:
        """The probabilities of several ascending ids."""
        return self.row() if ids.size == self.vocab_size else self.row()[ids]

    def row(self) -> Float64s:
        """The probabilities of all ids [V]."""
        if self.ids.size == self.vocab_size:
            return self.probs
        row = np.zeros(self.vocab_size)
        row[self.ids] = self.probs
        return row

    def residual(self, other: Law, scale: float = 1.0) -> tuple[Law, float]:
        """max(0, scale * self - other), made a law, and its mass before that.

        Where rounding leaves no mass, the law itself is returned beside a mass of 0: the rejection that asks for the
        residual has probability 0 then.
        """
        rest, mass = subtract(self.ids, self.probs, other.ids, other.probs, scale)
        return (self, 0.0) if mass <= 0 else (Law(self.ids, rest / mass, self.vocab_size), mass)

    def without(self, token: int) -> Law:
        """The law given that the id is not drawn; itself where nothing else could be."""
        rest = np.where(self.ids == token, 0.0, self.probs)
        mass = float(rest.sum())
        return self if mass <= 0 else Law(self.ids, rest / mass, self.vocab_size)

    def entropy(self) -> float:
        """In nats."""
        probs = self.probs[self.probs > 0]
        return float(-(probs * np.log(probs)).sum())

    def draw(self, randomness: Randomness, sequence: Sequence, node: int) -> int:
        """The token that follows `node`, the last accepted one of this step."""
        return randomness.draw(sequence.noise_key(node, PURPOSE_CORRECT), self.ids, self.probs)[0]


def law_of(logits: Float32s, history: History) -> Law:
    """The law of the token that follows `history`, given the logits [V] of its row.

    Raises:
        ParameterError, SakiyomiError: as `choose`.
    """
    if history.params.is_greedy:
        return Law.one_hot(choose(logits, history), logits.size)
    ids, weights = weigh(logits, history)
    return Law(ids, weights / np.add.reduce(weights), logits.size)  # weights.sum() without its overhead


def law_at(output: Output, i: int, history: History) -> Law:
    """The law of the i-th asked row of an output; one that remembers laws has a method `law` and is asked for its own.

    Raises:
        ParameterError, SakiyomiError: as `choose`.
    """
    remembered: Callable[[int, History], Law] | None = getattr(output, "law", None)
    return law_of(output.row(i), history) if remembered is None else remembered(i, history)


class KeyedRandomness:
    """`noise.Randomness` that is a pure function of its key."""

    def flip(self, key: NoiseKey, p: float, q: float = 1.0) -> bool:
        # u is in [0, 1) and the test is strict, so that nothing of probability 0 is ever accepted; q may underflow.
        return toss(key) * q < p

    def draw(self, key: NoiseKey, ids: Ids, probs: Float64s, count: int = 1) -> list[int]:
        return race(ids, probs, key, count)


class TargetLaws:
    """The laws along a draft, the target's and the drafter's, each computed when it is first asked for."""

    def __init__(self, draft: Draft, output: Output, sequence: Sequence) -> None:
        self._draft = draft
        self._output = output
        self._sequence = sequence
        self._laws: dict[int, Law] = {}
        self._drafted: dict[int, Law] = {}

    def after(self, node: int) -> Law:
        """The law of the token that follows `node` (-1: the root)."""
        if node not in self._laws:
            self._laws[node] = law_at(self._output, node + 1, path_history(self._draft, node, self._sequence))
        return self._laws[node]

    def drafted(self, node: int) -> Law:
        """The law that comes with `node` of a sampled draft."""
        if node not in self._drafted:
            self._drafted[node] = draft_law(self._draft, node, self.after(self._draft.parents[node]).vocab_size)
        return self._drafted[node]


def path_history(draft: Draft, node: int, sequence: Sequence) -> History:
    """The history of the token that follows `node`."""
    return sequence.history(tuple(draft.tokens[ancestor] for ancestor in draft.path(node)))


def drawn_children(draft: Draft, node: int, vocab_size: int) -> Iterator[tuple[int, Law]]:
    """The children of `node` in the order of drawing, each with the law it was drawn from given the ones before."""
    remaining: Law | None = None
    for child in draft.draws_below(node):
        law = draft_law(draft, child, vocab_size) if remaining is None else remaining
        yield child, law
        if draft.drawn == "without_replacement":
            remaining = law.without(draft.tokens[child])


def draft_law(draft: Draft, node: int, vocab_size: int) -> Law:
    """The law that comes with `node` of a sampled draft, its sum made 1."""
    assert draft.probs is not None
    probs = np.asarray(draft.probs[node], np.float64)
    ids = np.arange(vocab_size) if draft.probs_ids is None else np.asarray(draft.probs_ids[node])
    total = float(np.add.reduce(probs))
    return Law(ids, probs if abs(total - 1) <= 1e-12 else probs / total, vocab_size)


def is_accepted(randomness: Randomness, sequence: Sequence, node: int, p: float, q: float) -> bool:
    """The coin of `node`: true with probability min(1, p / q)."""
    return randomness.flip(sequence.noise_key(node, PURPOSE_ACCEPT), p, q)


# ---------------------------------------------------------------------------------------------- the simple cases


def follow_choices(draft: Draft, output: Output, sequence: Sequence) -> Verdict:
    """Choose each token as plain decoding does, and follow the draft while it guessed right."""
    return Verdict(*draft.follow(lambda node, tokens: output.choose(node + 1, sequence.history(tokens))))


def is_decided_by_choice(draft: Draft, sequence: Sequence, rule: str) -> bool:
    """Whether `follow_choices` is the form that a rule with draft laws takes for this draft.

    So it is at temperature 0, for an empty draft, and for one that is a function of the prefix: there q is one-hot,
    and drawing from p and comparing accepts and emits with the very law of the rule, whatever probabilities the drafter
    may have computed on the way. A coupled draft has no q at all.

    Raises:
        ParameterError: for a coupled draft at a temperature above 0.
    """
    if sequence.params.is_greedy or draft.drawn == "fixed" or not draft.tokens:
        return True
    if draft.drawn == "coupled":
        raise ParameterError(
            f"{rule} cannot judge drafts that share the target's noise: their q is unknown to it; give the drafter "
            "draw=independent or draw=argmax, or take the verifier match."
        )
    return False


def require_chain(draft: Draft, rule: str) -> None:
    """Raise ParameterError unless a sampled draft is a chain, drawn once per position."""
    if not draft.is_chain or draft.draws not in (None, tuple(range(len(draft)))):
        raise ParameterError(
            f"{rule} judges chains, and this draft is a tree of {len(draft)} sampled nodes; take the verifier tree or "
            "traversal, or give the drafter width=1."
        )


def accept_path(draft: Draft, path: tuple[int, ...], final: int, lossy: tuple[int, ...] = ()) -> Verdict:
    """The verdict that keeps `path` and ends with the token `final`."""
    return Verdict(path, (*(draft.tokens[node] for node in path), final), lossy)


# ---------------------------------------------------------------------------------------------- what the rules share


class SampledRule(Verifier):
    """A rule that keeps the distribution: it judges sampled drafts, and follows the plain choices for all others.

    A rule derives from it, says its name, whether its drafts are chains, and how it judges.
    """

    is_lossless: Lossless = "distribution"
    draw: DrawMode = "independent"
    name: str
    needs_chain: bool = False

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """These rules have no options."""

    def __init__(self, config: Config | None = None, randomness: Randomness | None = None) -> None:
        self.config = config or self.Config()
        self.randomness = randomness or KeyedRandomness()

    def verify(self, draft: Draft, output: Output, sequence: Sequence) -> Verdict:
        if is_decided_by_choice(draft, sequence, self.name):
            return follow_choices(draft, output, sequence)
        if self.needs_chain:
            require_chain(draft, self.name)
        return self.judge(draft, TargetLaws(draft, output, sequence), sequence)

    @abstractmethod
    def judge(self, draft: Draft, laws: TargetLaws, sequence: Sequence) -> Verdict:
        """Judge a sampled draft of at least one node at a temperature above 0."""
