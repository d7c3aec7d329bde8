"""Run the benchmark: every drafter, rule and temperature over every group of prompts, beside plain decoding."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from typing import Any

from sakiyomi.assemble import LoadedModel, ModelOptions, make_drafter, make_verifier
from sakiyomi.bench.prompts import Groups
from sakiyomi.errors import ParameterError
from sakiyomi.llm import LLM
from sakiyomi.measure import (
    Comparison,
    Report,
    SharedPrompt,
    Spread,
    Trials,
    Way,
    answer_with,
    compare_speeds,
    median_speed,
    outputs_of,
)
from sakiyomi.params import SamplingParams

PLAIN = "none"
ALL = "all"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured.

    Attributes:
        drafters, verifiers: names with options, as on the command line.
        temperatures: of each request.
        num_tokens: length of an answer at most.
        num_rounds: repetitions of every prompt.
        seed: of requests at temperatures above 0.
    """

    drafters: tuple[str, ...] = ("auto",)
    verifiers: tuple[str, ...] = ("match",)
    temperatures: tuple[float, ...] = (0.0,)
    num_tokens: int = 128
    num_rounds: int = 3
    seed: int = 20

    def __post_init__(self) -> None:
        for name in ("num_tokens", "num_rounds"):
            if getattr(self, name) < 1:
                raise ParameterError(f"{name}={getattr(self, name)} is not allowed; give at least 1.")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One drafter with one rule at one temperature over one group.

    Attributes:
        engine: "sakiyomi", or the peer.
        num_tokens: tokens of one round's answers.
        speedup: over plain decoding in the same rounds.
        acceptance_per_position: share of steps that accepted the position (marginal).
        conditional_acceptance: the same among the steps that put it to the test.
        draft_share: the drafter's part of the time of decoding.
        is_identical: whether every answer has the token ids of plain decoding.
        keeps: what the rule keeps: "tokens", "distribution" or "no".
    """

    group: str
    temperature: float
    drafter: str
    verifier: str
    num_prompts: int
    num_tokens: int
    tokens_per_s: float
    speedup: Spread
    mean_acceptance_length: float | None = None
    acceptance_per_position: tuple[float, ...] = ()
    conditional_acceptance: tuple[float, ...] = ()
    draft_share: float | None = None
    is_identical: bool = True
    keeps: str = "tokens"
    engine: str = "sakiyomi"


@dataclass(frozen=True, kw_only=True)
class Result:
    """All rows, and how they came about."""

    rows: list[Row]
    settings: Settings
    provenance: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """One object with the keys provenance, settings and rows."""
        return {
            "provenance": self.provenance,
            "settings": asdict(self.settings),
            "rows": [asdict(r) for r in self.rows],
        }


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of answering that is measured; `way` answers the ids of a prompt.

    Its output is a RequestOutput, or for other engines than ours something with `token_ids` and `num_passes`.
    """

    drafter: str
    verifier: str
    keeps: str
    way: Way[Seq[int]]
    engine: str = "sakiyomi"

    @property
    def name(self) -> str:
        return f"{self.engine}: {self.drafter}, {self.verifier}"


def run_benchmark(
    loaded: LoadedModel,
    options: ModelOptions,
    groups: Groups,
    settings: Settings,
    *,
    peers: Callable[[SamplingParams], list[Arm]] = lambda params: [],
    provenance: Mapping[str, Any] | None = None,
    report: Report = lambda what, done, total: None,
    show: Callable[[Row], None] = lambda row: None,
) -> Result:
    """Measure.

    Args:
        options: how drafting models are loaded.
        peers: makes the arms of other engines for the parameters of a request.
        show: given each row as soon as it is known.
    """
    rows: list[Row] = []
    encode = encoder(loaded)
    prompts = {group: [encode(text) for text in texts] for group, texts in groups.items()}
    for temperature in settings.temperatures:
        params = SamplingParams(temperature=temperature, max_tokens=settings.num_tokens, seed=settings.seed)
        arms = [*_make_arms(loaded, options, settings, params), *peers(params)]
        comparison = Comparison({arm.name: arm.way for arm in arms}, num_rounds=settings.num_rounds, report=report)
        measured = {group: comparison.run(ids) for group, ids in prompts.items()}
        if len(measured) > 1:
            measured[ALL] = {arm.name: [t for one in measured.values() for t in one[arm.name]] for arm in arms}
        for group, trials in measured.items():
            for row in _summarize(group, temperature, arms, trials):
                rows.append(row)
                show(row)
    return Result(rows=rows, settings=settings, provenance={**describe_run(loaded, options), **(provenance or {})})


def encoder(loaded: LoadedModel) -> Callable[[str], list[int]]:
    """From a text to the ids of a prompt, through the chat template where the model has one."""
    llm = LLM.from_loaded(loaded)
    if loaded.chat_template is not None:
        return lambda text: llm.render([{"role": "user", "content": text}])
    if loaded.tokenizer is None:
        raise ParameterError(f"{llm.info.name} has no tokenizer, so it cannot be given a prompt.")
    return loaded.tokenizer.encode


def _make_arms(loaded: LoadedModel, options: ModelOptions, settings: Settings, params: SamplingParams) -> Iterator[Arm]:
    prompt = SharedPrompt()
    yield Arm(PLAIN, "match", "tokens", answer_with(LLM.from_loaded(loaded), params, prompt))
    for verifier in settings.verifiers:
        rule = make_verifier(verifier)
        for name in settings.drafters:
            if name != PLAIN:
                drafter = make_drafter(name, loaded, options, draw=rule.draw)
                llm = LLM.from_loaded(loaded, drafter=drafter, verifier=verifier)
                yield Arm(name, verifier, rule.is_lossless, answer_with(llm, params, prompt))


def _summarize(group: str, temperature: float, arms: Seq[Arm], trials: Mapping[str, Trials]) -> Iterator[Row]:
    base = trials[arms[0].name]
    truths: dict[str, list[list[int]]] = {}
    for arm in arms:
        own = trials[arm.name]
        truth = truths.setdefault(arm.engine, _token_ids(own))  # each engine's first way is plain decoding
        yield Row(
            group=group,
            temperature=temperature,
            drafter=arm.drafter,
            verifier=arm.verifier,
            num_prompts=len(own),
            num_tokens=int(sum(rounds[0].amount for rounds in own)),
            tokens_per_s=median_speed(own),
            speedup=compare_speeds(base, own),
            is_identical=_token_ids(own) == truth,
            keeps=arm.keeps,
            engine=arm.engine,
            **(_acceptance(own) if arm.engine == "sakiyomi" else _count_passes(own)),
        )


def _token_ids(trials: Trials) -> list[list[int]]:
    outputs = [trial.output for rounds in trials for trial in rounds]
    return [list(getattr(one, "outputs", [one])[0].token_ids) for one in outputs]


def _count_passes(trials: Trials) -> dict[str, Any]:
    answers = [trial.output for rounds in trials for trial in rounds]
    return {"mean_acceptance_length": sum(len(a.token_ids) for a in answers) / sum(a.num_passes for a in answers)}


def _acceptance(trials: Trials) -> dict[str, Any]:
    """What the drafts of an arm were worth, over all its answers."""
    outputs = outputs_of(trials)
    stats = [output.speculation for output in outputs]
    num_steps = sum(one.num_steps for one in stats)
    accepted = _mean_by_position([(one.acceptance_per_position, one.num_steps) for one in stats])
    tried = _mean_by_position([(one.tried_per_position, one.num_steps) for one in stats])
    seconds = sum(output.timing.decode_s for output in outputs)
    return {
        "mean_acceptance_length": 1 + sum(one.num_accepted_tokens for one in stats) / num_steps,
        "acceptance_per_position": accepted,
        "conditional_acceptance": tuple(a / t for a, t in zip_longest(accepted, tried, fillvalue=0.0)),
        "draft_share": sum(output.timing.draft_s for output in outputs) / seconds,
    }


def _mean_by_position(values: Seq[tuple[Seq[float], int]]) -> tuple[float, ...]:
    """Mean of several lists, each with a weight; what a list lacks is 0."""
    total = sum(weight for _, weight in values)
    columns = zip_longest(*([value * weight for value in one] for one, weight in values), fillvalue=0.0)
    return tuple(sum(column) / total for column in columns)


def describe_run(loaded: LoadedModel, options: ModelOptions) -> dict[str, Any]:
    """Model, machine and versions."""
    info = loaded.model.info
    try:
        own = version("sakiyomi")
    except PackageNotFoundError:
        own = "run from its sources"
    return {
        "model": info.name,
        "dtype": info.dtype,
        "device": options.device,
        "threads": options.threads,
        "machine": platform.machine(),
        "num_cpus": os.cpu_count(),
        "load_before": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "sakiyomi": own,
    }
