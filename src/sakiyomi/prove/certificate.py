"""A certificate that speculation leaves the output alone, for one model, drafter, verifier and setting.

Everything that is claimed is tested in the run itself, and so is the test: verifiers that are wrong on purpose must be
rejected by it, else nothing is certified.
"""

from __future__ import annotations

import hashlib
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sakiyomi.assemble import LoadedModel
from sakiyomi.decode import forget
from sakiyomi.drafters.none import NoneDrafter
from sakiyomi.drafters.planted import PlantedDrafter, Script, follow, scatter, stray
from sakiyomi.errors import ParameterError
from sakiyomi.params import SamplingParams
from sakiyomi.prove.controls import CONTROLS
from sakiyomi.prove.identity import IdentityResult, Noise, Plain, Way, answer_plainly, compare, measure_noise
from sakiyomi.prove.law import ALPHA, POWER, Bench, Context, LawResult, find_contexts
from sakiyomi.prove.memo import MemoModel, remember
from sakiyomi.types import Drafter, Model, Verifier

Outcome = Literal["proven", "refuted", "void"]
Report = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""
MakeDrafter = Callable[[Callable[[Model], Model]], Drafter]
"""Builds the drafter, with the given function put around every model that it uses."""

DEFAULT_PROMPTS = (
    "Why is the sky blue?",
    "List the first ten prime numbers, then list them again in reverse order.",
    "Repeat this list twice, word for word: red, green, blue, red, green, yellow, red, green, blue.",
)
DEFAULT_SETTINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.9),
)
CHAIN_BUDGET, TREE_BUDGET = 2, 6
CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is tested.

    Attributes:
        settings: the sampling parameters; their seed, lengths and end are the plan's.
        num_tokens: tokens of each answer that is compared.
        num_draws: answers drawn for a law, over all contexts.
        num_contexts: contexts per sampled setting.
        budget: nodes of a draft at most when laws are tested; None takes 2 for chains and 6 for trees, which is depth
            2 for both: what lies deeper is not reached by the two tokens of an answer.
    """

    settings: tuple[SamplingParams, ...] = DEFAULT_SETTINGS
    num_tokens: int = 32
    num_draws: int = 6000
    num_contexts: int = 2
    budget: int | None = None
    seed: int = 20

    def __post_init__(self) -> None:
        for name in ("num_tokens", "num_draws", "num_contexts", "budget"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ParameterError(f"{name}={getattr(self, name)} is not allowed; give at least 1.")

    def params(self, setting: SamplingParams) -> SamplingParams:
        """The parameters of the answers that are compared."""
        return replace(setting, seed=self.seed, max_tokens=self.num_tokens)


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What a run has shown.

    Attributes:
        outcome: "proven"; "refuted" where the verifier failed its test; "void" where the test itself has shown
            nothing, since no control was rejected or nothing was drafted.
        claim: what is proven; reason: why it is, or is not.
        identity, identity_controls: the verifier, and wrong ones, against plain decoding.
        noise: of the backend, for each setting, where it does not promise equal bits.
        law, law_controls, contexts: the verifier, and wrong ones, against the target's laws.
        provenance: what was run, so that it can be run again.
    """

    outcome: Outcome
    claim: str
    reason: str
    identity: tuple[IdentityResult, ...]
    identity_controls: tuple[IdentityResult, ...]
    noise: Mapping[str, Noise]
    law: LawResult | None
    law_controls: tuple[LawResult, ...]
    contexts: tuple[Context, ...]
    provenance: Mapping[str, Any]

    @property
    def is_proven(self) -> bool:
        return self.outcome == "proven"

    def to_json(self) -> dict[str, Any]:
        """One object of plain values; numbers that JSON lacks become texts."""
        values = {"certificate": 1, "proven": self.is_proven, "alpha": ALPHA, "power": POWER} | asdict(self)
        for key in ("law", "law_controls"):
            results = [self.law] if key == "law" else self.law_controls
            found = [None if result is None else _law_json(result) for result in results]
            values[key] = found[0] if key == "law" else found
        plain: dict[str, Any] = _plain(values)
        return plain


def certify(
    loaded: LoadedModel,
    make_drafter: MakeDrafter,
    verifier: Verifier,
    prompts: Seq[Seq[int]],
    plan: Plan | None = None,
    *,
    provenance: Mapping[str, Any] | None = None,
    report: Report = lambda what, done, total: None,
) -> Certificate:
    """Test a verifier with a drafter on a model.

    Raises:
        ParameterError: a lossy verifier, which cannot be certified; no prompt.
    """
    refuse_lossy(verifier)
    if not prompts:
        raise ParameterError("there are no prompts; give at least one.")
    started, cpu_started = time.perf_counter(), time.process_time()
    run = _Run(loaded.model, make_drafter, verifier, prompts, plan or Plan(), report)
    has_law = verifier.is_lossless == "distribution" and not all(s.is_greedy for s in run.plan.settings)
    certificate = run.certify_law() if has_law else run.certify_tokens()
    took = {
        "seconds": round(time.perf_counter() - started, 1),
        "cpu_seconds": round(time.process_time() - cpu_started, 1),
    }
    return replace(certificate, provenance={**(provenance or {}), **run.describe(), **took})


def refuse_lossy(verifier: Verifier) -> None:
    """Raise ParameterError for a verifier that promises nothing."""
    if verifier.is_lossless not in ("tokens", "distribution"):
        name = type(verifier).__module__.rpartition(".")[2]
        raise ParameterError(f"the verifier {name} is lossy, so there is nothing to certify; take match or rejection.")


@dataclass
class _Run:
    model: Model
    make_drafter: MakeDrafter
    verifier: Verifier
    prompts: Seq[Seq[int]]
    plan: Plan
    report: Report
    noise: dict[str, Noise] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "num_prompts": len(self.prompts),
            "prompt_token_ids": [list(prompt) for prompt in self.prompts],
            "settings": [describe_params(setting) for setting in plan.settings],
            "num_tokens": plan.num_tokens,
            "num_draws": plan.num_draws,
            "budget": plan.budget,
            "seed": plan.seed,
        }

    # ------------------------------------------------------------------------------------------ token identity

    def certify_tokens(self) -> Certificate:
        results: list[IdentityResult] = []
        controls: list[IdentityResult] = []
        sampled = [setting for setting in self.plan.settings if not setting.is_greedy]
        for setting in self.plan.settings:
            plains, noise = self._answer_plainly(setting)
            for way in self._ways(plains):
                results.append(self._compare(way, plains, setting, noise))
            if setting in (sampled or self.plan.settings)[:1]:
                controls = self._run_identity_controls(plains, setting, noise)
        return self._conclude(
            results,
            controls,
            claim=self._token_claim(),
            is_refuted=any(result.finding == "fault" for result in results),
            has_drafted=any(result.num_draft_tokens for result in results if result.way == "drafter"),
            are_controls_seen=all(control.finding == "fault" for control in controls),
        )

    def _token_claim(self) -> str:
        if self.model.info.is_bit_exact:
            return "for a seed, every token is the one of plain decoding, chosen from a row of logits of the same bits"
        return "for a seed, every token is the one of plain decoding, up to rounding of the backend"

    def _ways(self, plains: Seq[Plain]) -> Iterator[Way]:
        """Drafters, budgets and companies."""
        drafter, num = self.make_drafter(lambda model: model), len(plains)
        truth = {plain.prompt: plain.tokens for plain in plains}
        size = self.model.info.vocab_size
        yield Way("drafter", drafter)
        yield Way("drafter", drafter, budget=2, batch=max(num, 2), is_reversed=True)
        yield Way("plain, batched", NoneDrafter(), budget=False, batch=max(num, 2))
        yield Way("true chains", planted(follow(truth, 6)), batch=2)
        yield Way("stray chains", planted(stray(truth, 5, size)), budget=5, batch=max(num, 2), is_reversed=True)
        yield Way("planted trees", planted(scatter(truth, 12, size)), batch=max(num, 2))
        yield Way("planted trees", planted(scatter(truth, 12, size, 1)), budget=4, batch=2, is_reversed=True)

    def _run_identity_controls(
        self, plains: Seq[Plain], setting: SamplingParams, noise: Noise | None
    ) -> list[IdentityResult]:
        """At temperature 0 a second draw is the same as the first, so only the other controls are wrong there."""
        truth = {plain.prompt: plain.tokens for plain in plains}
        way = Way("stray chains", planted(stray(truth, 5, self.model.info.vocab_size)), batch=len(plains))
        controls = [control for control in CONTROLS if not (setting.is_greedy and control.name == "redraw")]
        return [
            self._compare(way, plains, setting, noise, control(self.verifier), f"{control.name}: {control.error}")
            for control in controls
        ]

    def _answer_plainly(self, setting: SamplingParams) -> tuple[list[Plain], Noise | None]:
        what, total = f"plain answers, {describe_params(setting)}", len(self.prompts) * self.plan.num_tokens
        plains = answer_plainly(self.model, self.prompts, self.plan.params(setting), report=self._counter(what, total))
        if self.model.info.is_bit_exact:
            return plains, None
        self.report(f"numeric noise, {describe_params(setting)}", 0, 1)
        noise = self.noise[describe_params(setting)] = measure_noise(self.model, plains)
        return plains, noise

    def _compare(
        self,
        way: Way,
        plains: Seq[Plain],
        setting: SamplingParams,
        noise: Noise | None,
        verifier: Verifier | None = None,
        error: str | None = None,
    ) -> IdentityResult:
        what = f"{way.name if error is None else error.partition(':')[0]}, {describe_params(setting)}"
        report = self._counter(what, sum(len(plain.tokens) for plain in plains))
        params = self.plan.params(setting)
        return compare(self.model, verifier or self.verifier, way, plains, params, noise, error=error, report=report)

    def _counter(self, what: str, total: int) -> Callable[[int], None]:
        done = 0

        def add(count: int) -> None:
            nonlocal done
            done += count
            self.report(what, min(done, total), total)

        return add

    # ------------------------------------------------------------------------------------------ the law

    def certify_law(self) -> Certificate:
        greedy = [setting for setting in self.plan.settings if setting.is_greedy]
        sampled = [setting for setting in self.plan.settings if not setting.is_greedy]
        results: list[IdentityResult] = []
        texts: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        for setting in self.plan.settings:
            plains, noise = self._answer_plainly(setting)
            texts += [(plain.prompt, plain.tokens) for plain in plains]
            if setting.is_greedy:
                ways = [way for way in self._ways(plains) if way.name == "drafter"]
                results += [self._compare(way, plains, setting, noise) for way in ways]
        law, controls, contexts = self._test_law(sampled, texts)
        return self._conclude(
            results,
            [],
            claim="sampled answers have the target's own distribution, as far as the stated test can tell"
            + (", and at temperature 0 every token is the one of plain decoding" if greedy else ""),
            is_refuted=any(result.finding == "fault" for result in results) or (law is not None and law.is_rejected),
            has_drafted=law is not None and law.num_draft_tokens > 0,
            not_reached=[s for s in sampled if not any(context.name == describe_params(s) for context in contexts)],
            are_controls_seen=any(control.is_rejected for control in controls),
            law=law,
            law_controls=tuple(controls),
            contexts=contexts,
        )

    def _test_law(
        self, settings: Seq[SamplingParams], texts: Seq[tuple[Seq[int], Seq[int]]]
    ) -> tuple[LawResult | None, list[LawResult], tuple[Context, ...]]:
        wrap = remember({})
        model, drafter = wrap(self.model), self.make_drafter(wrap)
        contexts = [context for setting in settings for context in self._find_contexts(model, drafter, setting, texts)]
        if not contexts:
            return None, [], ()
        bench, num = Bench(model, drafter, contexts), self.plan.num_draws

        def test(verifier: Verifier, name: str, error: str | None = None) -> LawResult:
            return bench.test(
                verifier,
                num,
                self.plan.seed,
                name=name,
                error=error,
                report=lambda done: self.report(f"draws, {name}", done, num),
            )

        law = test(self.verifier, "the verifier")
        controls = [test(control(self.verifier), control.name, control.error) for control in CONTROLS]
        return law, controls, tuple(contexts)

    def _find_contexts(
        self, model: MemoModel, drafter: Drafter, setting: SamplingParams, texts: Seq[tuple[Seq[int], Seq[int]]]
    ) -> list[Context]:
        self.report(f"contexts, {describe_params(setting)}", 0, 1)
        params = replace(setting, max_tokens=None, ignore_eos=True)

        def make(tokens: tuple[int, ...], num_prompt: int) -> Context:
            return Context(describe_params(setting), tokens, num_prompt, params, self.plan.budget or CHAIN_BUDGET)

        found = find_contexts(model, drafter, texts, make, self.plan.num_contexts)
        if self.plan.budget is None and found and drafts_trees(model, drafter, found[0]):
            found = [replace(context, budget=TREE_BUDGET) for context in found]
        return found

    # ------------------------------------------------------------------------------------------ the end

    def _conclude(
        self,
        identity: Seq[IdentityResult],
        controls: Seq[IdentityResult],
        *,
        claim: str,
        is_refuted: bool,
        has_drafted: bool,
        are_controls_seen: bool,
        not_reached: Seq[SamplingParams] = (),
        law: LawResult | None = None,
        law_controls: tuple[LawResult, ...] = (),
        contexts: tuple[Context, ...] = (),
    ) -> Certificate:
        outcome: Outcome = "proven"
        reason = "the verifier passed every test, and verifiers that are wrong on purpose did not"
        if is_refuted:
            outcome, reason = "refuted", "the verifier failed a test; see the evidence"
        elif not has_drafted:
            outcome, reason = "void", "the drafter guessed nothing where it was tested; give other prompts or a drafter"
        elif not_reached:
            names = "; ".join(describe_params(setting) for setting in not_reached)
            outcome, reason = "void", f"the drafter guessed nothing at {names}; give other prompts or a drafter"
        elif not are_controls_seen:
            outcome, reason = "void", "a verifier that is wrong on purpose passed the test, so the test shows nothing"
        return Certificate(
            outcome=outcome,
            claim=claim,
            reason=reason,
            identity=tuple(identity),
            identity_controls=tuple(controls),
            noise=self.noise,
            law=law,
            law_controls=law_controls,
            contexts=contexts,
            provenance={},
        )


def drafts_trees(model: MemoModel, drafter: Drafter, context: Context) -> bool:
    """Whether the drafter's guess at a context is a tree."""
    sequence = Bench(model, drafter, [context]).sequence(0)
    draft = drafter.propose([sequence], [TREE_BUDGET])[0]
    forget(drafter, sequence)
    return not draft.is_chain


def planted(script: Script) -> PlantedDrafter:
    """A drafter that plays a script."""
    return PlantedDrafter(PlantedDrafter.Config(script=script))


def describe_params(params: SamplingParams) -> str:
    """A setting for people: its temperature, and the filters that are on."""
    parts = [f"temperature {params.temperature:g}"]
    parts += [f"{name} {getattr(params, name):g}" for name in ("top_k", "min_p") if getattr(params, name) > 0]
    return ", ".join([*parts, *([f"top_p {params.top_p:g}"] if params.top_p < 1 else [])])


# ---------------------------------------------------------------------------------------------- provenance


def describe_model(loaded: LoadedModel) -> dict[str, Any]:
    """Name and digest of a model, and what computes it."""
    info = loaded.model.info
    ops = getattr(getattr(loaded.model, "decoder", None), "ops", None)
    return {
        "model": info.name,
        "model_sha256": digest(loaded.path),
        "architecture": info.architecture,
        "dtype": info.dtype,
        "backend": type(loaded.model).__module__.rpartition(".")[2],
        "is_bit_exact": info.is_bit_exact,
        "isa": getattr(ops, "isa", None),
        "threads": getattr(ops, "threads", None),
        "version": _version(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": getattr(sys.modules.get("torch"), "__version__", None),
        "machine": platform.machine(),
    }


def digest(path: Path) -> str | None:
    """SHA-256 of a model file, or over names and contents of a folder's files; None where there is neither."""
    if not path.exists():
        return None
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
    total = hashlib.sha256()
    for file in files:
        if path.is_dir():
            total.update(file.name.encode() + b"\0")
        with file.open("rb") as stream:
            while chunk := stream.read(CHUNK):
                total.update(chunk)
    return total.hexdigest()


def _version() -> str:
    try:
        return version("sakiyomi")
    except PackageNotFoundError:
        return "run from its sources"


def _law_json(result: LawResult) -> dict[str, Any]:
    return asdict(result) | {"rejected": result.is_rejected, "least_deviation": result.least_deviation}


def _plain(value: Any) -> Any:
    """`value` as JSON has it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    if isinstance(value, SamplingParams):
        return describe_params(value)
    if isinstance(value, np.generic):
        return value.item()
    return value
