"""Bursts: what several steps in one call do is what the same steps do one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sakiyomi import LLM, SamplingParams
from sakiyomi.assemble import LoadedModel, ModelOptions, make_drafter
from sakiyomi.decode import Step
from sakiyomi.engine import budget as rules_of_budget
from sakiyomi.engine import burst, engine
from sakiyomi.engine.acceptance import Acceptance
from sakiyomi.engine.budget import AdaptiveBudget, BurstPlan, _Asked, _merge
from sakiyomi.engine.costs import DraftCosts, PassCosts
from sakiyomi.engine.engine import Engine, Job
from sakiyomi.ops.base import BurstStep
from sakiyomi.ops.native import NativeOps
from sakiyomi.params import SamplingParams as Params
from sakiyomi.tree import Draft
from sakiyomi.types import Drafter, Sequence
from trained_toy import END

pytest.importorskip("sakiyomi._native")
GREEDY = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each burst that was made the number of its steps."""
    lengths: list[int] = []

    def run(*arguments: Any) -> Any:
        steps = burst.run_burst(*arguments)
        lengths.append(len(steps))
        return steps

    monkeypatch.setattr(engine, "run_burst", run)
    return lengths


@pytest.fixture(params=["int8", "float32"])
def toy(request: pytest.FixtureRequest, trained_toy: Any) -> LoadedModel:
    return load(trained_toy, request.param)


def load(trained_toy: Any, dtype: str = "int8") -> LoadedModel:
    model = trained_toy.load(dtype=dtype)
    return LoadedModel(model=model, tokenizer=None, chat_template=None, path=trained_toy.folder)


@pytest.fixture
def without_bursts(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(engine, "makes_bursts", lambda model, verifier: False)


def run_jobs(loaded: LoadedModel, drafter: Drafter, prompts: list[list[int]], params: Params) -> list[Job]:
    """The jobs of one engine, one behind the other."""
    llm = LLM.from_loaded(loaded, drafter=drafter, max_num_seqs=1)
    requests = [llm.requests.build(prompt, params) for prompt in prompts]
    llm.run(requests)
    return [job for request in requests for job in request.jobs]


DRAFTERS = [
    "none",
    "suffix",
    "suffix:width=1,num_speculative_tokens=3",
    "ngram",
    "ngram:max_ngram=7,min_ngram=2,num_speculative_tokens=9",
    "ngram:occurrence=earliest",
    "mlp",
    "mlp:width=3,max_nodes=7",
    "mlp:draw=argmax",
    "auto",
]
SAMPLED = SamplingParams(temperature=1, max_tokens=120, ignore_eos=True, seed=3)
FILTERED = [{"temperature": 0.7, "top_p": 0.9}, {"top_k": 5}, {"min_p": 0.05}, {"top_k": 40, "top_p": 0.8}]


def drafter_of(name: str, loaded: LoadedModel, mlp: Path) -> Drafter:
    name = name.replace("auto", f"auto:parts=suffix+mlp:path={mlp}")
    if name.startswith("mlp"):
        name = f"mlp:path={mlp}" + name[3:].replace(":", ",")
    return make_drafter(name, loaded, ModelOptions())


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_tokens_are_those_of_single_steps(
    toy: LoadedModel,
    trained_toy: Any,
    toy_mlp: Path,
    runs: list[int],
    without_bursts: Callable[[], None],
    name: str,
    params: Params,
) -> None:
    compare_with_single_steps(toy, trained_toy.prompts[:6], toy_mlp, runs, without_bursts, name, params)


@pytest.mark.parametrize("filters", FILTERED, ids=str)
@pytest.mark.parametrize("name", ["suffix", "mlp:width=2,max_nodes=5"])
def test_filters_are_those_of_single_steps(
    trained_toy: Any,
    toy_mlp: Path,
    runs: list[int],
    without_bursts: Callable[[], None],
    name: str,
    filters: dict[str, float],
) -> None:
    params = Params(max_tokens=60, ignore_eos=True, seed=5, **filters)  # type: ignore[arg-type]
    toy = load(trained_toy)
    compare_with_single_steps(toy, trained_toy.prompts[:4], toy_mlp, runs, without_bursts, name, params)


def compare_with_single_steps(
    toy: LoadedModel,
    prompts: list[list[int]],
    mlp: Path,
    runs: list[int],
    without_bursts: Callable[[], None],
    name: str,
    params: Params,
) -> None:
    together = run_jobs(toy, drafter_of(name, toy, mlp), prompts, params)
    assert max(runs) > 3
    num_bursts = len(runs)
    without_bursts()
    apart = run_jobs(toy, drafter_of(name, toy, mlp), prompts, params)
    assert len(runs) == num_bursts
    for one, other in zip(together, apart, strict=True):
        assert one.sequence.tokens == other.sequence.tokens
        assert one.sequence.num_steps == len(one.steps) == one.counter.num_steps
        assert [token for step in one.steps for token in step.tokens] == one.sequence.tokens[one.sequence.num_prompt :]
        # A fixed budget asks for the same drafts, so all that is told of the steps is the same too.
        if name != "auto":
            assert one.steps == other.steps


@pytest.mark.parametrize(
    "params",
    [
        Params(temperature=0, max_tokens=1),
        Params(temperature=0, max_tokens=17, ignore_eos=True),
        Params(temperature=0, max_tokens=90, stop_token_ids=[12, 45]),
        Params(temperature=0, max_tokens=60, min_tokens=20, stop_token_ids=list(range(0, END, 2))),
        Params(temperature=0, max_tokens=60, n=3),
        Params(temperature=0, max_tokens=60, logit_bias={3: 5.0}),
        Params(temperature=0, max_tokens=60, repetition_penalty=1.1),
        Params(temperature=0, max_tokens=60, logprobs=2),
        Params(temperature=0.8, max_tokens=60, seed=4, n=2),
        Params(temperature=0.8, max_tokens=60, seed=4, presence_penalty=0.2),
        Params(temperature=0, max_tokens=None),
    ],
    ids=lambda params: str(params)[-40:],
)
def test_every_kind_of_request_ends_as_it_does_without(
    trained_toy: Any, toy_mlp: Path, without_bursts: Callable[[], None], params: Params
) -> None:
    loaded = load(trained_toy)
    prompts = trained_toy.prompts[:2] if params.max_tokens is None else trained_toy.prompts[:5]
    together = run_jobs(loaded, drafter_of("auto", loaded, toy_mlp), prompts, params)
    without_bursts()
    apart = run_jobs(loaded, make_drafter("none", loaded, ModelOptions()), prompts, params)
    for one, other in zip(together, apart, strict=True):
        assert one.sequence.tokens == other.sequence.tokens
        assert (one.sequence.finish_reason, one.sequence.stop_reason) == (
            other.sequence.finish_reason,
            other.sequence.stop_reason,
        )


@pytest.mark.parametrize("budget", ["adaptive", "fixed"])
@pytest.mark.parametrize("wish", [False, 1, 2, 5])
def test_no_more_is_drafted_than_a_request_allows(
    trained_toy: Any, toy_mlp: Path, runs: list[int], budget: Any, wish: bool | int
) -> None:
    loaded = load(trained_toy)
    name = "auto" if budget == "adaptive" else "suffix"
    llm = LLM.from_loaded(loaded, drafter=drafter_of(name, loaded, toy_mlp), budget=budget, max_num_seqs=1)
    requests = [llm.requests.build(prompt, GREEDY, None, wish) for prompt in trained_toy.prompts[:6]]
    llm.run(requests)
    counts = {step.num_draft for request in requests for job in request.jobs for step in job.steps}
    assert max(runs) > 3
    if budget == "fixed":
        assert max(counts) == int(wish)
    assert max(counts) <= int(wish)


@dataclass
class Watcher:
    """A stop string that ends with the n-th token."""

    left: int

    def push(self, token_id: int) -> str | None:
        assert self.left > 0, "a token behind the end"
        self.left -= 1
        return None if self.left else "stop"


@pytest.mark.parametrize("num_tokens", [1, 2, 9, 30, 31, 32, 33])
def test_a_stop_string_within_a_burst_takes_back_what_follows(
    trained_toy: Any, toy_mlp: Path, runs: list[int], num_tokens: int
) -> None:
    loaded = load(trained_toy)
    drafter = drafter_of("auto", loaded, toy_mlp)
    llm = LLM.from_loaded(loaded, drafter=drafter)
    (job,) = llm.requests.build(trained_toy.prompts[0], GREEDY).jobs
    job.keeps_cache = True
    job.sequence.watcher = Watcher(num_tokens)
    steps = Engine(loaded.model, drafter, llm.verifier, max_num_seqs=1, budget=AdaptiveBudget(drafter))
    steps.add(job)
    while steps.has_work:
        steps.step()
    sequence = job.sequence
    whole = run_jobs(loaded, drafter, trained_toy.prompts[:1], GREEDY)[0].sequence.tokens
    assert (sequence.num_new, sequence.finish_reason, sequence.stop_reason) == (num_tokens, "stop", "stop")
    assert sequence.cache.length == len(sequence.tokens) - 1
    assert sum(len(step.tokens) for step in job.steps) == num_tokens
    assert all(step.num_accepted <= len(step.tokens) for step in job.steps)
    # What is kept goes on as the whole text did: as a chat's next turn would.
    sequence.watcher = sequence.finish_reason = sequence.stop_reason = None
    again = Job(sequence)
    steps.add(again)
    while steps.has_work:
        steps.step()
    assert sequence.tokens == whole
    assert max(runs) > 3


def test_a_drafter_in_python_is_asked_by_steps_of_its_own(trained_toy: Any, runs: list[int]) -> None:
    """The budget tries it now and then; between the trials, while it draws blanks, steps go in bursts."""
    loaded = load(trained_toy)

    class Slow(Drafter):
        wants_budget = True
        num_asked = 0

        def propose(self, sequences: Any, budgets: Any) -> list[Draft]:
            self.num_asked += len(sequences)
            sum(range(200_000))
            return [Draft.chain([1] * min(2, budget)) for budget in budgets]

    drafter = Slow()
    jobs = run_jobs(loaded, drafter, trained_toy.prompts[:2], Params(temperature=0, max_tokens=400, ignore_eos=True))
    plain = run_jobs(
        loaded, make_drafter("none", loaded, ModelOptions()), trained_toy.prompts[:2], jobs[0].sequence.params
    )
    assert [job.sequence.tokens for job in jobs] == [job.sequence.tokens for job in plain]
    assert max(runs) > 3
    assert 2 < drafter.num_asked < 200


def test_a_long_answer_outgrows_its_cache(trained_toy: Any, toy_mlp: Path, without_bursts: Callable[[], None]) -> None:
    loaded = load(trained_toy)
    params = Params(temperature=0, max_tokens=None, ignore_eos=True)
    together = run_jobs(loaded, drafter_of("auto", loaded, toy_mlp), trained_toy.prompts[:1], params)[0]
    assert len(together.sequence.tokens) == loaded.model.info.max_model_len
    without_bursts()
    apart = run_jobs(loaded, drafter_of("none", loaded, toy_mlp), trained_toy.prompts[:1], params)[0]
    assert together.sequence.tokens == apart.sequence.tokens


def test_damaged_logits_fail_the_job_as_they_do_without(
    trained_toy: Any, toy_mlp: Path, monkeypatch: pytest.MonkeyPatch, without_bursts: Callable[[], None]
) -> None:
    def fail() -> str:
        loaded = load(trained_toy, "float32")
        loaded.model.decoder.norm[5] = np.nan
        with pytest.raises(Exception, match="nan") as told:
            LLM.from_loaded(loaded).generate([1, 2, 3], GREEDY)
        return str(told.value)

    together = fail()
    without_bursts()
    assert together == fail()


def test_a_stream_tells_every_token_once_and_the_first_alone(trained_toy: Any, toy_mlp: Path, runs: list[int]) -> None:
    loaded = load(trained_toy)
    llm = LLM.from_loaded(loaded, drafter=drafter_of("auto", loaded, toy_mlp))
    pieces = list(llm.stream(trained_toy.prompts[0], GREEDY))
    whole = pieces[-1].output
    assert whole is not None
    assert all(piece.output is None for piece in pieces[:-1])
    assert [piece.index for piece in pieces] == list(range(GREEDY.max_tokens or 0))
    assert [piece.token_id for piece in pieces] == whole.outputs[0].token_ids
    assert [piece.index for piece in pieces if piece.source == "draft"] == whole.outputs[0].drafted
    assert runs[0] <= 1 < max(runs)


# ---------------------------------------------------------------------------------------------- the budget's rules


@dataclass
class Checker(AdaptiveBudget):
    """A budget that makes in Python each choice of a burst's first step, and compares."""

    drafter: Drafter
    num_compared: int = field(default=0, init=False)
    kinds: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        super().__init__(self.drafter)
        self._is_first = False

    def plan_burst(self, sequence: Sequence, cap: int, max_seconds: float, info: Any) -> BurstPlan | None:
        self._is_first = True
        return super().plan_burst(sequence, cap, max_seconds, info)

    def record_burst(self, sequence: Sequence, plan: BurstPlan, found: BurstStep, context: int) -> None:
        if self._is_first and plan.rules.sources:
            self.compare(sequence, plan, found)
        self._is_first = False
        super().record_burst(sequence, plan, found, context)

    def compare(self, sequence: Sequence, plan: BurstPlan, found: BurstStep) -> None:
        drafts = {draft.source: draft for draft in found.drafts}
        missing, pool = 1.0, []
        num_left = plan.rules.num_left
        for number, source in enumerate(self._sources):
            outlook = self._outlooks_of(sequence)[number]
            sequence.num_steps -= 1
            wanted = self._count(source, outlook, sequence, 64, missing, 1, plan.curve)
            sequence.num_steps += 1
            if number not in drafts:
                assert wanted == 0
                continue
            draft = drafts[number]
            rules = plan.rules.sources[number]
            assert draft.num_asked == (wanted if rules.seconds else min(wanted, rules.max_nodes))
            assert draft.is_trial == outlook.is_trial
            assert len(draft.draft) <= min(draft.num_asked, num_left - 1)
            gains, kinds = outlook.acceptance.judge(draft.draft)
            assert draft.kinds == kinds
            np.testing.assert_allclose(draft.gains, gains, rtol=1e-12)
            pool.append(_Asked(outlook, 0, draft.draft, gains, kinds))
            missing -= sum(gain for gain, parent in zip(gains, draft.draft.parents, strict=True) if parent < 0)
            self.num_compared += len(gains) > 0
            self.kinds |= {"trial"} if draft.is_trial else {"priced"} if rules.seconds else {"free"}
        merged, gains_of_all = _merge(pool, 64) if pool else (Draft.empty(), [])
        count = self._num_checked(gains_of_all, plan.curve[1 : len(gains_of_all) + 2], plan.rules.rate)
        assert found.num_draft == count
        assert_followed(merged.trim(count, count), found)


def assert_followed(draft: Draft, found: BurstStep) -> None:
    """The step is what this draft and these tokens make of it."""
    node, accepted = -1, 0
    for token in found.tokens:
        child = draft.child(node, token)
        if child is None:
            break
        node, accepted = child, accepted + 1
    was_tried = len(found.tokens) > accepted and node in draft.parents
    assert (found.num_accepted, found.num_tried) == (accepted, accepted + was_tried)


@pytest.mark.parametrize("parts", ["suffix", "suffix+mlp", "suffix:width=1,min_match=2+mlp:width=2,max_nodes=6"])
@pytest.mark.parametrize("free_share", [0.0, 1e9])
def test_choices_are_those_of_the_budget(
    trained_toy: Any, toy_mlp: Path, monkeypatch: pytest.MonkeyPatch, parts: str, free_share: float
) -> None:
    monkeypatch.setattr(rules_of_budget, "FREE_SHARE", free_share)
    monkeypatch.setattr(rules_of_budget, "MAX_BURST_STEPS", 3)
    # Beside a toy no draft would be worth its price, and no clock shall decide here.
    monkeypatch.setattr(DraftCosts, "seconds", lambda costs, number: 1e-7 * number)
    monkeypatch.setattr(
        PassCosts, "curve", lambda costs, context, rows: [1e-4 + 4e-6 * n for n in range(max(rows, 32) + 1)]
    )
    loaded = load(trained_toy)
    name = "auto:parts=" + parts.replace("mlp", f"mlp:path={toy_mlp}").replace(f"{toy_mlp}:", f"{toy_mlp},")
    drafter = make_drafter(name, loaded, ModelOptions())
    budget = Checker(drafter)
    llm = LLM.from_loaded(loaded, drafter=drafter, max_num_seqs=1)
    llm._budget = budget
    llm.generate(trained_toy.prompts, GREEDY)
    assert budget.num_compared > 40
    assert budget.kinds >= ({"priced"} if free_share == 0 else {"free"})


def test_what_never_seems_to_pay_is_checked_now_and_then(
    trained_toy: Any, toy_mlp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows look dearer than passes; still every third step checks a node, in bursts as elsewhere."""
    monkeypatch.setattr(rules_of_budget, "CHECK_PAUSE", 2)
    monkeypatch.setattr(rules_of_budget, "MAX_BURST_STEPS", 9)
    monkeypatch.setattr(rules_of_budget, "FREE_SHARE", 1.0)
    dear = [1e-3 * max(4 * n - 3, 1) for n in range(200)]
    monkeypatch.setattr(PassCosts, "curve", lambda costs, context, rows: dear)
    loaded = load(trained_toy)

    class Watcher(Checker):
        checks: list[int]

        def record_burst(self, sequence: Sequence, plan: BurstPlan, found: BurstStep, context: int) -> None:
            if any(len(draft.draft) for draft in found.drafts):
                self.checks.append(found.num_draft)
            super().record_burst(sequence, plan, found, context)

    budget = Watcher(make_drafter(f"auto:parts=suffix+mlp:path={toy_mlp}", loaded, ModelOptions()))
    budget.checks = []
    llm = LLM.from_loaded(loaded, drafter=budget.drafter, max_num_seqs=1)
    llm._budget = budget
    llm.generate(trained_toy.prompts[:4], GREEDY)
    assert set(budget.checks) == {0, 1}
    assert 0.25 < np.mean(budget.checks) < 0.4


def test_what_a_node_is_believed_with_is_a_line() -> None:
    from sakiyomi.engine.acceptance import FADE_SHARED, FIRST_OF_DEPTHS, Rates

    rng = np.random.default_rng(0)
    acceptance = Acceptance(Rates(FADE_SHARED))
    for kind in rng.integers(FIRST_OF_DEPTHS, size=300).tolist():
        acceptance._add(kind, bool(rng.random() < 0.4))
    offsets, slopes = acceptance.lines()
    for share in (0.0, 0.05, 0.3, 0.91, 1.0):
        for kind in range(FIRST_OF_DEPTHS):
            assert offsets[kind] + slopes[kind] * share == pytest.approx(acceptance._rate(kind, share), rel=1e-12)


# ---------------------------------------------------------------------------------------------- what is refused


def test_impossible_arguments_are_refused(trained_toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(trained_toy)
    llm = LLM.from_loaded(loaded)
    caught: list[tuple[Any, ...]] = []

    def catch(self: NativeOps, *arguments: Any) -> Iterator[Step]:
        caught.append((self, *arguments))
        raise KeyboardInterrupt

    whole = NativeOps.run_burst
    monkeypatch.setattr(NativeOps, "run_burst", catch)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([1, 2, 3], GREEDY)
    ops, *fields = caught[0]
    *_, rules = fields
    for at, value, told in (
        (0, 10_000, "an id is out of range"),
        (6, (5,), "taps must ascend"),
        (7, np.zeros((1, 3), np.float32), "the width of first_taps"),
        (9, rules._replace(seconds=[1.0]), "the seconds of a pass"),
    ):
        wrong = [*fields]
        wrong[at] = value
        with pytest.raises(ValueError, match=told):
            whole(ops, *wrong)
