"""Is the text the same with speculation as without, and are the rows of logits that decide it the same?

Prompts are answered plainly, one at a time, and then in other ways: with drafters, budgets and companies of other
requests. For every emitted token the row that decided it is held against the plain one. Where the backend promises
equal bits, anything else is a fault. Elsewhere a row may differ by rounding, whose size is measured with plain passes
of other shapes; a token may differ if its row differs by rounding alone and the token is what plain decoding chooses
from that very row.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from sakiyomi.drafters.none import NoneDrafter
from sakiyomi.engine.engine import Engine, Job
from sakiyomi.engine.metrics import AcceptanceCounter
from sakiyomi.params import SamplingParams
from sakiyomi.sampling.choose import choose, rank
from sakiyomi.tree import Draft
from sakiyomi.types import Cache, Drafter, History, Model, Output, Sequence, Span, Verdict, Verifier
from sakiyomi.verify.match import MatchVerifier

Logits: TypeAlias = npt.NDArray[np.float32]
Finding = Literal["identical", "rounding", "fault"]

NOISE_MARGIN = 8.0  # the noise is measured on some rows in some shapes; others were seen to have twice as much
MAX_NOISE_ULPS = 256.0  # what differs by more is no rounding
EPSILONS = {"float64": 2.0**-23, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}  # logits are float32
MAX_DIFFERENCES = 20  # listed per way


@dataclass(frozen=True)
class Way:
    """A way to answer all prompts that must change nothing.

    Attributes:
        budget: nodes of a draft at most (the request's `speculation`); True leaves it to the drafter.
        batch: requests that share a step at most.
        is_reversed: whether the prompts come in reverse order, so that others are neighbours.
    """

    name: str
    drafter: Drafter
    budget: bool | int = True
    batch: int = 1
    is_reversed: bool = False


@dataclass(frozen=True)
class Plain:
    """The plain answer to a prompt: its tokens, with the row that decided each."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    rows: tuple[Logits, ...]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A token or a row that is not the plain one.

    Attributes:
        prompt, position: number of the prompt, and of the token in its answer.
        gap: between the two best candidates of the plain row, in logits (scores with noise times the temperature).
        change: how far the rows differ: the largest change of the gap between any two logits.
        limit: what rounding explains.
    """

    prompt: int
    position: int
    plain_token: int
    token: int
    gap: float
    change: float
    limit: float
    finding: Finding


@dataclass(frozen=True, kw_only=True)
class IdentityResult:
    """What one way gave.

    Attributes:
        error: what is known to be wrong with the verifier, a control; None for the one that is to be proven.
        num_rows, num_same_rows: rows of logits that were held against plain ones, and those with the same bits.
        max_change: the largest difference of a row (see `Difference`).
        differences: the first ones.
    """

    way: str
    temperature: float
    budget: bool | int
    batch: int
    error: str | None
    num_prompts: int
    num_same_texts: int
    num_rows: int
    num_same_rows: int
    max_change: float
    num_draft_tokens: int
    num_accepted_tokens: int
    mean_acceptance_length: float
    num_differences: int
    differences: tuple[Difference, ...]
    finding: Finding


def answer(
    model: Model,
    verifier: Verifier,
    way: Way,
    prompts: Seq[Seq[int]],
    params: SamplingParams,
    *,
    report: Callable[[int], None] = lambda done: None,
) -> tuple[list[Sequence], AcceptanceCounter]:
    """Answer the prompts in one way. Sequences come in the order of prompts; a sequence's id is its prompt's number.

    Args:
        report: called with the number of tokens just committed.

    Raises:
        Exception: what ended a request early.
    """
    engine = Engine(model, way.drafter, verifier, max_num_seqs=way.batch)
    jobs = [Job(_sequence(model, number, prompt, params, way.budget)) for number, prompt in enumerate(prompts)]
    for job in reversed(jobs) if way.is_reversed else jobs:
        engine.add(job)
    while engine.has_work:
        report(sum(len(step.tokens) for _, step in engine.step()))
    counter = AcceptanceCounter()
    for job in jobs:
        if job.error is not None:
            raise job.error
        counter.merge(job.counter)
    return [job.sequence for job in jobs], counter


def answer_plainly(
    model: Model,
    prompts: Seq[Seq[int]],
    params: SamplingParams,
    *,
    report: Callable[[int], None] = lambda done: None,
) -> list[Plain]:
    """The answers that every other way is held against: nothing drafted, one prompt at a time."""
    rows: list[list[Logits]] = [[] for _ in prompts]

    def see(history: History, token: int, row: Logits, sequence: Sequence) -> None:
        rows[int(sequence.id)].append(np.array(row))

    way = Way("plain", NoneDrafter(), False)
    sequences, _ = answer(model, Watcher(MatchVerifier(), see), way, prompts, params, report=report)
    return [
        Plain(tuple(prompt), tuple(sequence.tokens[sequence.num_prompt :]), tuple(seen))
        for prompt, sequence, seen in zip(prompts, sequences, rows, strict=True)
    ]


def compare(
    model: Model,
    verifier: Verifier,
    way: Way,
    plains: Seq[Plain],
    params: SamplingParams,
    noise: Noise | None,
    *,
    error: str | None = None,
    report: Callable[[int], None] = lambda done: None,
) -> IdentityResult:
    """Answer in one way and hold it against the plain answers.

    Args:
        noise: None where the model promises equal bits.
        error: what is known to be wrong with the verifier, a control.
    """
    judge = _Judge(plains, noise)
    prompts = [plain.prompt for plain in plains]
    sequences, counter = answer(model, Watcher(verifier, judge.see), way, prompts, params, report=report)
    texts = [tuple(sequence.tokens[sequence.num_prompt :]) for sequence in sequences]
    num_same = sum(text == plain.tokens for text, plain in zip(texts, plains, strict=True))
    num_rows = sum(len(plain.tokens) for plain in plains)
    finding: Finding = "identical" if num_same == len(plains) and judge.num_same == num_rows else "rounding"
    # A text that differs without a difference seen at any row was not made of what the rows say.
    explained = {difference.prompt for difference in judge.differences}
    unexplained = any(
        text != plain.tokens and number not in explained
        for number, (text, plain) in enumerate(zip(texts, plains, strict=True))
    )
    if unexplained or any(difference.finding == "fault" for difference in judge.differences):
        finding = "fault"
    return IdentityResult(
        way=way.name,
        temperature=params.temperature,
        budget=way.budget,
        batch=way.batch,
        error=error,
        num_prompts=len(plains),
        num_same_texts=num_same,
        num_rows=judge.num_rows,
        num_same_rows=judge.num_same,
        max_change=judge.max_change,
        num_draft_tokens=counter.num_draft_tokens,
        num_accepted_tokens=counter.num_accepted_tokens,
        mean_acceptance_length=counter.mean_acceptance_length,
        num_differences=len(judge.differences),
        differences=tuple(judge.differences[:MAX_DIFFERENCES]),
        finding=finding,
    )


class Watcher(Verifier):
    """A verifier that shows, for each emitted token, the row that must have decided it.

    Args:
        see: called with the token's history, the token, the row and the sequence, before anything is committed.
    """

    def __init__(self, inner: Verifier, see: Callable[[History, int, Logits, Sequence], None]) -> None:
        self.is_lossless = inner.is_lossless
        self.draw = inner.draw
        self._inner = inner
        self._see = see

    def verify(self, draft: Draft, output: Output, sequence: Sequence) -> Verdict:
        verdict = self._inner.verify(draft, output, sequence)
        rows = (0, *(node + 1 for node in verdict.path))
        for index, (row, token) in enumerate(zip(rows, verdict.tokens, strict=True)):
            self._see(sequence.history(verdict.tokens[:index]), token, output.row(row), sequence)
        return verdict


@dataclass
class _Judge:
    """Holds tokens and rows against the plain ones, as far as the text before them is the same."""

    plains: Seq[Plain]
    noise: Noise | None
    num_rows: int = 0
    num_same: int = 0
    max_change: float = 0.0
    differences: list[Difference] = field(default_factory=list)

    def see(self, history: History, token: int, row: Logits, sequence: Sequence) -> None:
        plain = self.plains[int(sequence.id)]
        before = (*history.tokens[history.num_prompt :], *history.path)
        if before != plain.tokens[: len(before)] or len(before) >= len(plain.tokens):
            return  # behind a difference, or behind the end
        expected = plain.rows[len(before)]
        is_same = np.array_equal(row.view(np.uint32), expected.view(np.uint32))
        self.num_rows += 1
        self.num_same += is_same
        change = 0.0 if is_same else change_of(row, expected)
        self.max_change = max(self.max_change, change)
        plain_token = plain.tokens[len(before)]
        limit = 0.0 if self.noise is None else self.noise.limit
        is_explained = self.noise is not None and change <= limit
        if token == plain_token and (is_same or is_explained):
            return
        is_rounding = is_explained and not is_same and token == choose(row, history)
        self.differences.append(
            Difference(
                prompt=int(sequence.id),
                position=len(before),
                plain_token=plain_token,
                token=token,
                gap=gap_of(expected, history),
                change=change,
                limit=limit,
                finding="rounding" if is_rounding else "fault",
            )
        )


def change_of(row: Logits, other: Logits) -> float:
    """The largest change of the gap between any two logits; infinite where a row holds nan."""
    usual = np.isfinite(row) & np.isfinite(other)
    if not np.array_equal(row[~usual], other[~usual]):
        return float("inf")
    change = row[usual].astype(np.float64) - other[usual]
    return float(change.max() - change.min())


def gap_of(row: Logits, history: History) -> float:
    """How far the chosen token is ahead of the next one, in logits; infinite where there is no other."""
    _, scores = rank(row, history, 2)
    gap = scores[0] - scores[1] if len(scores) > 1 else float("inf")
    return gap if history.params.is_greedy else gap * history.params.temperature


# ---------------------------------------------------------------------------------------------- numeric noise


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How far rows move when the same text is computed plainly in other shapes.

    Attributes:
        measured: the largest change of the gap between any two logits of a row.
        plausible: the most that rounding in the model's number format explains.
        shapes: the shapes compared, with the largest change of each.
    """

    measured: float
    plausible: float
    shapes: tuple[tuple[str, float], ...]

    @property
    def limit(self) -> float:
        """What counts as rounding."""
        return min(NOISE_MARGIN * self.measured, self.plausible)


def measure_noise(model: Model, plains: Seq[Plain]) -> Noise:
    """Compute the rows of plain answers again, in shapes that plain serving has too: no trees, no verifier."""
    shapes = {
        "one pass over an answer": [_recompute(model, [plain], len(plain.tokens)) for plain in plains],
        "passes of 4 rows": [_recompute(model, [plain], 4) for plain in plains],
        "passes of 5 rows of every answer": [_recompute(model, plains, 5)],
    }
    scale = max(float(np.abs(row[np.isfinite(row)]).max()) for plain in plains for row in plain.rows)
    found = tuple((name, max(changes)) for name, changes in shapes.items())
    epsilon = EPSILONS.get(model.info.dtype, EPSILONS["float32"])
    return Noise(measured=max(change for _, change in found), plausible=MAX_NOISE_ULPS * epsilon * scale, shapes=found)


def _recompute(model: Model, plains: Seq[Plain], size: int) -> float:
    """The largest change of a row when `size` rows of each answer are computed in a pass."""
    caches = [_prefilled(model, plain) for plain in plains]
    largest = 0.0
    for start in range(0, max(len(plain.tokens) for plain in plains), size):
        spans, active = [], []
        for plain, cache in zip(plains, caches, strict=True):
            tokens = (plain.prompt[-1], *plain.tokens[:-1])[start : start + size]
            if tokens:
                spans.append(Span(cache, tokens, range(-1, len(tokens) - 1), range(len(tokens))))
                active.append(plain)
        for plain, span, output in zip(active, spans, model.forward(spans), strict=True):
            for i in range(len(span.tokens)):
                largest = max(largest, change_of(output.row(i), plain.rows[start + i]))
            span.cache.keep(range(len(span.tokens)))
    return largest


def _prefilled(model: Model, plain: Plain) -> Cache:
    cache = model.new_cache()
    tokens = plain.prompt[:-1]
    if tokens:
        model.forward([Span(cache, tokens, range(-1, len(tokens) - 1))])
        cache.keep(range(len(tokens)))
    return cache


def _sequence(model: Model, number: int, prompt: Seq[int], params: SamplingParams, speculation: bool | int) -> Sequence:
    ends = () if params.ignore_eos else model.info.end_token_ids
    return Sequence(
        id=str(number),
        tokens=list(prompt),
        num_prompt=len(prompt),
        params=params,
        seed=params.seed or 0,
        cache=model.new_cache(),
        end_ids=frozenset((*ends, *(params.stop_token_ids or ()))),
        speculation=speculation,
    )
