"""Stage `measure`: what a drafter reaches in the real decoding loop, on prompts that it was not made from.

For each temperature, rule and draft length: how many tokens a step emits, how often the first, second, ... token of a
draft is accepted, and the same for each kind of text; beside it a drafter that needs no training.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sakiyomi.assemble import LoadedModel, ModelOptions, make_drafter, make_verifier
from sakiyomi.decode import prefill
from sakiyomi.drafters.none import NoneDrafter
from sakiyomi.errors import ParameterError
from sakiyomi.llm import LLM
from sakiyomi.params import SamplingParams
from sakiyomi.results import RequestOutput, SpeculationStats
from sakiyomi.train.corpus import Corpus
from sakiyomi.train.estimate import Announce, Estimate, Report, announce_nothing, private_bytes, say_nothing
from sakiyomi.types import Model
from sakiyomi.types import Sequence as TokenSequence

NUM_RESAMPLES = 1000
PROBE_TOKENS = 24
MAX_LENGTH = 64


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """Settings of the stage `measure`.

    Args:
        prompts: how many prompts to answer, taken evenly from the documents.
        max_tokens: length of an answer.
        lengths: tokens of a draft.
        temperatures: at each of them; above 0 every rule of `verifiers` judges, at 0 they are all the same.
        verifiers: acceptance rules.
        baseline: a drafter to compare with, at the same lengths; "" for none.
        hold_out_every: every so many documents one is kept away from the fit, to be measured on; 0 keeps none away.
        documents: "held_out", or "training": the very documents of the fit.
        batch: answers at the same time, which changes no acceptance.
        seed: of the answers' noise.
    """

    prompts: int = 32
    max_tokens: int = 96
    lengths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    verifiers: tuple[str, ...] = ("match", "rejection")
    baseline: str = "ngram"
    hold_out_every: int = 40
    documents: str = "held_out"
    batch: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        if self.documents not in ("held_out", "training"):
            raise ParameterError(f"measure: documents={self.documents!r} is not allowed; give held_out or training.")
        if not self.lengths or not all(1 <= length <= MAX_LENGTH for length in self.lengths):
            raise ParameterError(f"measure: lengths={list(self.lengths)}; give draft lengths from 1 to {MAX_LENGTH}.")
        if self.prompts < 1 or self.max_tokens < 1 or self.batch < 1 or self.hold_out_every < 0:
            raise ParameterError("measure: prompts, max_tokens and batch are at least 1, hold_out_every at least 0.")

    def held_out(self, num_documents: int) -> list[int]:
        """The documents kept away from the fit."""
        every = self.hold_out_every
        return list(range(every - 1, num_documents, every)) if every else []


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one drafter reached with one draft length, temperature and rule.

    Attributes:
        mean_acceptance_length: tokens per step, the target's own included; `low` and `high` bound it at 95 % (bootstrap
            over prompts).
        acceptance_per_position: for each position of a draft the share of steps that accepted it.
        conditional: the same among the steps that accepted the position before.
        groups: mean acceptance length by kind of text.
    """

    drafter: str
    length: int
    temperature: float
    verifier: str
    num_prompts: int
    num_steps: int
    num_draft_tokens: int
    mean_acceptance_length: float
    low: float
    high: float
    acceptance_per_position: tuple[float, ...]
    conditional: tuple[float, ...]
    groups: Mapping[str, float]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class HeldOutPrompt:
    """The ids up to the first answer of a document."""

    group: str
    ids: list[int]


def choose_prompts(corpus: Corpus, indices: Sequence[int], count: int) -> list[HeldOutPrompt]:
    """Prompts of `count` of the documents, evenly spread."""
    chosen = [indices[int(i)] for i in np.linspace(0, len(indices) - 1, min(count, len(indices)))] if indices else []
    firsts = dict(zip(corpus.spans[::-1, 0].tolist(), corpus.spans[::-1, 1].tolist(), strict=True))
    return [HeldOutPrompt(corpus.group_of(i), corpus.tokens_of(i)[: firsts[i]].tolist()) for i in chosen]


def measure_drafter(
    target: LoadedModel,
    name: str,
    options: Mapping[str, Any],
    prompts: Sequence[HeldOutPrompt],
    config: MeasureConfig,
    report: Report = say_nothing,
    announce: Announce = announce_nothing,
) -> list[Measurement]:
    """Answer the prompts with a drafter and with the baseline, at every length, temperature and rule.

    Args:
        name, options: of the drafter, as for `assemble.make_drafter`.

    Raises:
        ParameterError: no prompts, or a drafter or rule that does not exist.
    """
    if not prompts:
        raise ParameterError(
            "there is nothing to measure on: no document was held out; write more text, or set measure.documents to "
            "training."
        )
    drafters = [(name, options), *([(config.baseline, {})] if config.baseline else [])]
    runs = [
        _Run(target, drafter, own, length, temperature, verifier, config)
        for drafter, own in drafters
        for temperature, verifier in _rules(config)
        for length in config.lengths
    ]
    announce(_estimate(runs, prompts, config))
    results = []
    for number, run in enumerate(runs):
        report(f"measuring {run.name} at temperature {run.temperature:g}", number, len(runs))
        results.append(run.measure(prompts))
        if run.name == name and not results[-1].num_draft_tokens:
            raise ParameterError(
                f"{name} drafted nothing in {results[-1].num_steps} steps; it failed (see the warnings), or "
                "min_confidence is too high."
            )
    report("measured", len(runs), len(runs))
    return results


def _rules(config: MeasureConfig) -> Iterable[tuple[float, str]]:
    for temperature in config.temperatures:
        for verifier in config.verifiers if temperature > 0 else config.verifiers[:1]:
            yield temperature, verifier


@dataclass(frozen=True)
class _Run:
    target: LoadedModel
    name: str
    options: Mapping[str, Any]
    length: int
    temperature: float
    verifier: str
    config: MeasureConfig

    def answer(self, prompts: Sequence[HeldOutPrompt], max_tokens: int) -> list[RequestOutput]:
        more = {**self.options, "num_speculative_tokens": self.length}
        draw = make_verifier(self.verifier).draw
        drafter = make_drafter(self.name, self.target, ModelOptions(), more, draw)
        llm = LLM.from_loaded(
            self.target, drafter=drafter, verifier=self.verifier, max_num_seqs=self.config.batch, seed=self.config.seed
        )
        params = SamplingParams(temperature=self.temperature, max_tokens=max_tokens)
        return llm.generate([prompt.ids for prompt in prompts], params, use_tqdm=False)

    def measure(self, prompts: Sequence[HeldOutPrompt]) -> Measurement:
        outputs = self.answer(prompts, self.config.max_tokens)
        stats = [output.speculation for output in outputs]
        steps = np.array([one.num_steps for one in stats], np.float64)
        accepted = np.array([one.num_accepted_tokens for one in stats], np.float64)
        drawn = np.random.default_rng(self.config.seed).integers(0, len(steps), (NUM_RESAMPLES, len(steps)))
        lengths = 1 + accepted[drawn].sum(1) / np.maximum(steps[drawn].sum(1), 1)
        low, high = np.quantile(lengths, (0.025, 0.975))
        positions = _per_position(stats)
        groups = sorted({prompt.group for prompt in prompts})
        of_group = {g: np.array([prompt.group == g for prompt in prompts]) for g in groups}
        return Measurement(
            drafter=self.name,
            length=self.length,
            temperature=self.temperature,
            verifier=self.verifier,
            num_prompts=len(prompts),
            num_steps=int(steps.sum()),
            num_draft_tokens=sum(one.num_draft_tokens for one in stats),
            mean_acceptance_length=float(1 + accepted.sum() / max(steps.sum(), 1)),
            low=float(low),
            high=float(high),
            acceptance_per_position=positions,
            conditional=tuple(
                here / before if before else 0.0 for here, before in zip(positions, (1.0, *positions), strict=False)
            ),
            groups={g: float(1 + accepted[m].sum() / max(steps[m].sum(), 1)) for g, m in of_group.items()},
        )


def _per_position(stats: Sequence[SpeculationStats]) -> tuple[float, ...]:
    total = sum(one.num_steps for one in stats)
    depth = max((len(one.acceptance_per_position) for one in stats), default=0)
    sums = np.zeros(depth)
    for one in stats:
        sums[: len(one.acceptance_per_position)] += np.array(one.acceptance_per_position) * one.num_steps
    return tuple((sums / max(total, 1)).tolist())


def _estimate(runs: Sequence[_Run], prompts: Sequence[HeldOutPrompt], config: MeasureConfig) -> Estimate:
    """Scale short runs with drafts of middling length, one of each drafter, temperature and rule."""
    sample, seconds, before = prompts[: config.batch], 0.0, private_bytes()
    kinds = itertools.groupby(runs, key=lambda run: (run.name, run.temperature, run.verifier))
    for number, (_, alike) in enumerate(kinds):
        lengths = sorted(alike, key=lambda run: run.length)
        middle = lengths[len(lengths) // 2]
        if number == 0:
            middle.answer(sample, 1)  # finds code and memory cold
        started = time.perf_counter()
        middle.answer(sample, 1)
        first = time.perf_counter() - started
        outputs = middle.answer(sample, min(PROBE_TOKENS, config.max_tokens))
        rest = max(time.perf_counter() - started - 2 * first, 0.0)
        num_more = sum(len(output.outputs[0].token_ids) - 1 for output in outputs)
        per_prompt = first / len(sample) + rest / max(num_more, 1) * (config.max_tokens - 1)
        seconds += len(lengths) * len(prompts) * per_prompt
    # What the short runs have left behind (weights of drafters, buffers), and the answers of a batch.
    held = max(private_bytes() - before, 0) + len(sample) * _cache_bytes(
        runs[0].target.model, prompts, config.max_tokens
    )
    return Estimate(what="measuring acceptance", seconds=seconds, disk_bytes=1 << 16, memory_bytes=held)


def _cache_bytes(model: Model, prompts: Sequence[HeldOutPrompt], max_tokens: int) -> int:
    """Of an answer to a prompt of middling length."""
    ids = sorted((prompt.ids for prompt in prompts), key=len)[len(prompts) // 2]
    sequence = TokenSequence("", list(ids), len(ids), SamplingParams(max_tokens=max_tokens), 0, model.new_cache())
    prefill(model, NoneDrafter(), sequence)
    return int(getattr(sequence.cache, "num_bytes", 0))
