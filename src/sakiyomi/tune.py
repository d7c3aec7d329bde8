"""tune: whether a model's own first layers are worth drafting with, and which.

A profile run: how often each exit agrees with the whole model along the model's own answers, what each pass costs, what
follows for the speed, and a check of the best of them in the real loop. Only what is faster there is chosen.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sakiyomi.assemble import LoadedModel, tuning_variant
from sakiyomi.errors import ParameterError
from sakiyomi.llm import LLM
from sakiyomi.measure import Comparison, Report, Spread, Trial, answer_with, compare_speeds, outputs_of
from sakiyomi.params import SamplingParams
from sakiyomi.plan.speedup import expected_tokens, speedup
from sakiyomi.plugins import MAX_DRAFT_TOKENS
from sakiyomi.tuned import save_choices
from sakiyomi.types import Model, Span

MAX_LENGTH = 6
NUM_CHECKS = 2
NUM_COST_ROUNDS = 9
PROMISING = 0.9
"""A second candidate is tried in the real loop if its predicted speed-up is at least this."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A part of the layers that might draft.

    Attributes:
        exit_layer, skip: as in the options of `layerskip`.
        num_leading: layers in front of the first that is skipped.
    """

    exit_layer: int
    skip: str
    num_leading: int

    @property
    def name(self) -> str:
        return f"skip {self.skip}" if self.skip else f"exit {self.exit_layer}"


@dataclass(frozen=True, kw_only=True)
class Exit:
    """What was measured of one candidate.

    Attributes:
        agreement: share of the answers' tokens that are its first choice too.
        survivals: for each position of a draft how probable it is that the draft is right up to it.
        draft_cost: of one drafted token, in plain steps.
        length: the draft length of the largest predicted speed-up.
        predicted: that speed-up.
    """

    candidate: Candidate
    agreement: float
    survivals: tuple[float, ...]
    draft_cost: float
    length: int
    predicted: float


@dataclass(frozen=True, kw_only=True)
class Check:
    """What a candidate gave in the real loop.

    Attributes:
        speedup: over plain decoding, in turns with it.
        mean_acceptance_length: tokens per step.
    """

    candidate: Candidate
    length: int
    speedup: Spread
    mean_acceptance_length: float


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The outcome.

    Attributes:
        plain_ms: a plain step behind the first prompt.
        pass_costs: v(1), v(2), ...: a pass over so many rows, in plain steps.
        exits: all candidates, in order; checks: the best ones, as they ran.
    """

    model: str
    num_prompts: int
    num_tokens: int
    plain_ms: float
    pass_costs: tuple[float, ...]
    exits: tuple[Exit, ...]
    checks: tuple[Check, ...]

    @property
    def best(self) -> Check:
        return max(self.checks, key=lambda check: check.speedup.value)

    @property
    def choice(self) -> dict[str, Any]:
        """What `layerskip` reads. It pays where even the lower bound of the measured speed-up is a gain."""
        best = self.best
        return {
            "pays": best.speedup.low > 1,
            "exit_layer": best.candidate.exit_layer,
            "skip": best.candidate.skip,
            "num_speculative_tokens": best.length,
            "speedup": best.speedup.value,
        }

    def to_json(self) -> dict[str, Any]:
        """All that was measured, and the choice."""
        return {**asdict(self), "choice": self.choice}


def tune_layerskip(
    loaded: LoadedModel,
    prompts: Seq[Seq[int]],
    *,
    num_tokens: int = 64,
    num_rounds: int = 3,
    report: Report = lambda what, done, total: None,
) -> Tuning:
    """Measure, at temperature 0.

    Args:
        prompts: their ids.
        num_tokens: of an answer at most.
        num_rounds: how often each prompt is answered in the check.

    Raises:
        ParameterError: no prompts, or a model of a single layer.
    """
    model = loaded.model
    if not prompts or not all(prompts):
        raise ParameterError("there is no prompt to tune with, or an empty one; give some.")
    if not 2 <= num_tokens <= MAX_DRAFT_TOKENS:
        raise ParameterError(f"num_tokens={num_tokens} is not allowed; give 2 to {MAX_DRAFT_TOKENS}.")
    if model.info.num_layers < 2:
        raise ParameterError(f"{model.info.name} has a single layer, so nothing of it can draft; take another model.")
    candidates = list_candidates(model.info.num_layers)
    params = SamplingParams(temperature=0, max_tokens=num_tokens)
    plain = LLM.from_loaded(loaded)
    agreed: dict[Candidate, list[list[bool]]] = {candidate: [] for candidate in candidates}
    total = 0
    for number, prompt in enumerate(prompts):
        report("comparing exits", number, len(prompts))
        answer = plain.generate([list(prompt)], params, use_tqdm=False)[0].outputs[0].token_ids
        total += len(answer)
        for candidate, flags in compare_exits(model, candidates, prompt, answer):
            agreed[candidate].append(flags)
    costs = measure_costs(model, candidates, prompts[0], report)
    exits = [judge(candidate, agreed[candidate], costs, model.info.num_layers) for candidate in candidates]
    return Tuning(
        model=model.info.name,
        num_prompts=len(prompts),
        num_tokens=total,
        plain_ms=1000 * costs.plain_s,
        pass_costs=costs.passes,
        exits=tuple(exits),
        checks=tuple(_check(loaded, prompts, _promising(exits), params, num_rounds, report)),
    )


def keep_choice(loaded: LoadedModel, tuning: Tuning) -> Path:
    """Keep the choice for later runs of this model; the file."""
    return save_choices(loaded.path, tuning_variant(loaded.model), {"layerskip": tuning.choice})


def list_candidates(num_layers: int) -> list[Candidate]:
    """Every exit, and some stretches in the middle that are left out."""
    exits = [Candidate(exit_layer=layer, skip="", num_leading=layer) for layer in range(1, num_layers)]
    skips = []
    for share in (8, 4, 3, 2):
        length = num_layers // share
        first = (num_layers - length + 1) // 2
        candidate = Candidate(exit_layer=num_layers, skip=f"{first}-{first + length - 1}", num_leading=first)
        if length and first > 0 and candidate not in skips:
            skips.append(candidate)
    return exits + skips


# ---------------------------------------------------------------------------------------------- agreement


def compare_exits(
    model: Model, candidates: Seq[Candidate], prompt: Seq[int], answer: Seq[int]
) -> Iterator[tuple[Candidate, list[bool]]]:
    """For each candidate, which tokens of the model's own answer it would have chosen, given all before them."""
    cache = model.new_cache()
    head, tokens = list(prompt[:-1]), [prompt[-1], *answer[:-1]]
    if head:
        model.forward([Span(cache, head, range(-1, len(head) - 1))])
        cache.keep(range(len(head)))
    computed = None
    for candidate in candidates:
        part = _part(model, candidate)
        span = Span(cache, tokens, range(-1, len(tokens) - 1), range(len(tokens)), computed=computed)
        output = part.forward([span])[0]
        # An exit goes on from the one before it.
        computed = getattr(output, "computed", None)
        yield candidate, [guess == token for guess, token in zip(output.argmax(), answer, strict=True)]


def _part(model: Model, candidate: Candidate) -> Model:
    skipped = range(0)
    if candidate.skip:
        first, last = map(int, candidate.skip.split("-"))
        skipped = range(first, last + 1)
    return model.shallow(candidate.exit_layer, skipped)


def survivals_of(answers: Seq[Seq[bool]], max_length: int = MAX_LENGTH) -> tuple[float, ...]:
    """For each position of a draft the share of places in the answers from where on all up to it is agreed on."""
    kept = np.zeros(max_length)
    total = 0
    for flags in answers:
        run = 0
        for flag in reversed(flags):
            run = run + 1 if flag else 0
            kept[: min(run, max_length)] += 1
        total += len(flags)
    return tuple((kept / max(total, 1)).tolist())


# ---------------------------------------------------------------------------------------------- costs


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Of passes, in plain steps.

    Attributes:
        plain_s: seconds of a plain step.
        passes: over 1, 2, ... rows of the whole model.
        drafts: over one row, for each candidate.
    """

    plain_s: float
    passes: tuple[float, ...]
    drafts: Mapping[Candidate, float]


def measure_costs(
    model: Model, candidates: Seq[Candidate], prompt: Seq[int], report: Report = lambda what, done, total: None
) -> Costs:
    """Time the passes behind a prompt."""
    cache = model.new_cache()
    head = list(prompt[:-1])
    if head:
        model.forward([Span(cache, head, range(-1, len(head) - 1))])
        cache.keep(range(len(head)))

    def timed(part: Model, num_rows: int) -> Trial:
        span = Span(cache, [prompt[-1]] * num_rows, range(-1, num_rows - 1), range(num_rows))
        started = time.perf_counter()
        part.forward([span])[0].argmax()
        return Trial(time.perf_counter() - started)

    ways = {f"{rows} rows": (lambda part, rows=rows: timed(part[None], rows)) for rows in range(1, MAX_LENGTH + 2)} | {
        candidate.name: (lambda part, one=candidate: timed(part[one], 1)) for candidate in candidates
    }
    parts: dict[Candidate | None, Model] = {None: model} | {one: _part(model, one) for one in candidates}
    trials = Comparison(ways, num_rounds=NUM_COST_ROUNDS, report=report).run([parts])
    medians = {name: statistics.median(trial.seconds for trial in own[0]) for name, own in trials.items()}
    plain = medians["1 rows"]
    return Costs(
        plain_s=plain,
        passes=tuple(medians[f"{rows} rows"] / plain for rows in range(1, MAX_LENGTH + 2)),
        drafts={one: medians[one.name] / plain for one in candidates},
    )


# ---------------------------------------------------------------------------------------------- judgement


def judge(candidate: Candidate, answers: Seq[Seq[bool]], costs: Costs, num_layers: int) -> Exit:
    """What a candidate promises: its best draft length, and the speed-up there."""
    a = survivals_of(answers)
    share = candidate.num_leading / num_layers

    def predict(length: int) -> float:
        # The check runs the leading layers over the last drafted token alone; the others have passed them.
        check = costs.passes[length] - share * (costs.passes[length] - costs.passes[0])
        return speedup(a[:length], check, length * costs.drafts[candidate])

    best = max(range(1, min(len(a), len(costs.passes) - 1) + 1), key=predict)
    return Exit(
        candidate=candidate,
        agreement=expected_tokens(a[:1]) - 1,
        survivals=a,
        draft_cost=costs.drafts[candidate],
        length=best,
        predicted=predict(best),
    )


def _promising(exits: Seq[Exit]) -> list[Exit]:
    """The best candidate, and the next ones that might pay."""
    order = sorted(exits, key=lambda one: -one.predicted)[:NUM_CHECKS]
    return [one for i, one in enumerate(order) if i == 0 or one.predicted >= PROMISING]


def _check(
    loaded: LoadedModel,
    prompts: Seq[Seq[int]],
    exits: Seq[Exit],
    params: SamplingParams,
    num_rounds: int,
    report: Report,
) -> Iterator[Check]:
    """Run candidates in the real loop, in turns with plain decoding."""
    ways = {"plain": answer_with(LLM.from_loaded(loaded), params)}
    for one in exits:
        skip = f",skip={one.candidate.skip}" if one.candidate.skip else ""
        spec = f"layerskip:exit_layer={one.candidate.exit_layer},num_speculative_tokens={one.length}{skip}"
        ways[one.candidate.name] = answer_with(LLM.from_loaded(loaded, drafter=spec), params)
    trials = Comparison(ways, num_rounds=num_rounds, report=report).run([list(prompt) for prompt in prompts])
    for one in exits:
        own = trials[one.candidate.name]
        stats = [output.speculation for output in outputs_of(own)]
        yield Check(
            candidate=one.candidate,
            length=one.length,
            speedup=compare_speeds(trials["plain"], own),
            mean_acceptance_length=1
            + sum(s.num_accepted_tokens for s in stats) / max(sum(s.num_steps for s in stats), 1),
        )
