"""The lossy rules: what they promise, that neutral knobs make them exact, and that they need consent."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from enumeration import PROMPT, ConstantTable, Table, TreeDrafter, emitted_law
from hypothesis import given, settings
from hypothesis import strategies as st

from sakiyomi import LLM
from sakiyomi.assemble import choose_drafter, make_verifier
from sakiyomi.cli.options import EngineOptions
from sakiyomi.decode import prefill, step
from sakiyomi.drafters.planted import PlantedDrafter
from sakiyomi.errors import ParameterError
from sakiyomi.models.toy import ToyModel, random_law
from sakiyomi.params import SamplingParams
from sakiyomi.sampling.distributions import KeyedRandomness, Law, law_of
from sakiyomi.tree import Draft
from sakiyomi.types import Drafter, History, Sequence, Verdict, Verifier
from sakiyomi.verify.lenient import LenientVerifier
from sakiyomi.verify.match import MatchVerifier
from sakiyomi.verify.rejection import RejectionVerifier
from sakiyomi.verify.relaxed import RelaxedVerifier
from sakiyomi.verify.typical import TypicalVerifier

VOCAB = 11


class _Rows:
    """An output with given rows; it chooses the largest, whatever the temperature."""

    taps = None

    def __init__(self, rows: Seq[Seq[float]]) -> None:
        with np.errstate(divide="ignore"):
            self._rows = [np.log(np.asarray(row)).astype(np.float32) for row in rows]

    def row(self, i: int) -> Any:
        return self._rows[i]

    def argmax(self) -> list[int]:
        return [int(row.argmax()) for row in self._rows]

    def choose(self, i: int, history: Any) -> int:
        return int(self._rows[i].argmax())


def judge(verifier: Verifier, draft: Draft, rows: Seq[Seq[float]], temperature: float = 1.0, **more: Any) -> Verdict:
    params = SamplingParams(temperature=temperature, max_tokens=None)
    sequence = Sequence("0", [1, 2], 2, params, 3, ToyModel(random_law(4), 4).new_cache(), **more)
    return verifier.verify(draft, _Rows(rows), sequence)


# ---------------------------------------------------------------------------------------------- consent


@pytest.mark.parametrize("name", ["typical", "lenient", "relaxed"])
def test_lossy_rules_need_consent(name: str) -> None:
    for spec in (name, f"{name}:lossy=false"):
        with pytest.raises(ParameterError, match=f"{name}:lossy=true"):
            make_verifier(spec)
    assert make_verifier(f"{name}:lossy=true").is_lossless == "no"


def test_only_who_builds_the_engine_can_choose_one() -> None:
    """No default, no key of vLLM's configuration and no field of a request names a verifier."""
    for build in (LLM, LLM.from_loaded, EngineOptions):
        assert inspect.signature(build).parameters["verifier"].default == "match"
    for key in ("verifier", "lossy", "acceptance_method", "rejection_sample_method"):
        with pytest.raises(ParameterError, match=key):
            choose_drafter(None, {"method": "ngram", key: "typical"}, {}, ())
    fields = {*SamplingParams.__dataclass_fields__, *Sequence.__dataclass_fields__}
    assert not any("verif" in name or "lossy" in name for name in fields)


@pytest.mark.parametrize(
    "spec",
    [
        "typical:lossy=true,epsilon=0.3,delta=0.09",
        "typical:lossy=true,epsilon=0",
        "lenient:lossy=true,lenience=0",
        "lenient:lossy=true,lenience=1.1",
        "relaxed:lossy=true,top_n=0",
        "relaxed:lossy=true,delta=2",
        "relaxed:lossy=yes",
    ],
)
def test_wrong_knobs_are_refused(spec: str) -> None:
    with pytest.raises(ParameterError, match="not allowed"):
        make_verifier(spec)


# ---------------------------------------------------------------------------------------------- lenient


def one_token(p: Table, make_drafter: Any, lenience: float) -> dict[tuple[int, ...], float]:
    config = LenientVerifier.Config(lossy=True, lenience=lenience)
    return emitted_law(p, make_drafter, lambda randomness: LenientVerifier(config, randomness), 1)


def probs_of(table: Table) -> Any:
    weights = np.exp(table(PROMPT).astype(np.float64))
    return weights / weights.sum()


@given(seed=st.integers(0, 10**6), lenience=st.sampled_from([1.0, 0.9, 0.5, 0.1]))
@settings(max_examples=15)
def test_lenience_keeps_its_bound(seed: int, lenience: float) -> None:
    p, q = Table(4, seed, 1), Table(4, seed + 1, 1)
    law = one_token(p, lambda r: TreeDrafter(q, (1,), "independent", r), lenience)
    target, drawn = probs_of(p), probs_of(q)
    emitted = np.array([law.get((token,), 0.0) for token in range(4)])
    assert (emitted <= target / lenience + 1e-12).all()
    closed_form = np.maximum(0, np.minimum(drawn, target / lenience) - target).sum()
    assert np.abs(emitted - target).sum() / 2 == pytest.approx(closed_form, abs=1e-12)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=5)
def test_lenience_of_a_certain_draft(seed: int) -> None:
    p, q = Table(4, seed), Table(4, seed + 1)
    law = one_token(p, lambda r: TreeDrafter(q, (1,), "fixed", r), 0.5)
    drafted = int(np.argmax(q(PROMPT)))
    assert law[drafted,] == pytest.approx(min(1, probs_of(p)[drafted] / 0.5), abs=1e-12)


def run(verifier: Verifier, drafter_of: Any, params: SamplingParams, seed: int = 5) -> tuple[list[int], Counter[str]]:
    model = ToyModel(random_law(VOCAB, 1), VOCAB)
    sequence = Sequence("0", [3, 1, 4], 3, params, seed, model.new_cache())
    drafter: Drafter = drafter_of
    prefill(model, drafter, sequence)
    counts: Counter[str] = Counter()
    while sequence.finish_reason is None:
        done = step(model, drafter, verifier, [sequence], [16])[0]
        counts += Counter(accepted=done.num_accepted, lossy=done.num_lossy, steps=1)
    return sequence.tokens, counts


def noisy_trees(kind: str, shape: Seq[int]) -> Drafter:
    class Wide(Table):
        def __call__(self, tokens: Seq[int]) -> Any:
            return random_law(VOCAB, 2)(tokens) * 0.5 + random_law(VOCAB, 1)(tokens)

    return TreeDrafter(Wide(VOCAB, 0), shape, kind, KeyedRandomness())


@pytest.mark.parametrize("kind", ["independent", "fixed"])
def test_lenience_of_one_is_rejection_bit_for_bit(kind: str) -> None:
    params = SamplingParams(temperature=1, max_tokens=60)
    neutral = LenientVerifier(LenientVerifier.Config(lossy=True, lenience=1.0))
    tokens, counts = run(neutral, noisy_trees(kind, (1, 1, 1)), params)
    assert tokens == run(RejectionVerifier(), noisy_trees(kind, (1, 1, 1)), params)[0]
    assert counts["lossy"] == 0 < counts["accepted"]
    generous = LenientVerifier(LenientVerifier.Config(lossy=True, lenience=0.1))
    _, more = run(generous, noisy_trees(kind, (1, 1, 1)), params)
    assert more["accepted"] > counts["accepted"]
    assert more["lossy"] > 0


def test_lenience_at_temperature_zero() -> None:
    verifier = LenientVerifier(LenientVerifier.Config(lossy=True, lenience=0.5))
    rows = [[0.6, 0.35, 0.05], [0.6, 0.35, 0.05], [0.1, 0.1, 0.8]]
    verdict = judge(verifier, Draft.chain([1, 0]), rows, temperature=0)
    assert (verdict.path, verdict.tokens, verdict.lossy) == ((0, 1), (1, 0, 2), (0,))
    verdict = judge(verifier, Draft.chain([2, 0]), rows, temperature=0)
    assert (verdict.path, verdict.tokens) == ((), (0,))


# ---------------------------------------------------------------------------------------------- typical


def law(probs: Seq[float]) -> Law:
    return Law(np.arange(len(probs)), np.asarray(probs, np.float64), len(probs))


@pytest.mark.parametrize(
    ("probs", "entropy", "threshold"),
    [((0.9, 0.05, 0.05), 0.394, 0.09), ((0.4, 0.3, 0.2, 0.1), 1.280, 0.0834), ((0.1,) * 10, 2.303, 0.03)],
)
def test_the_threshold_of_typical(probs: Seq[float], entropy: float, threshold: float) -> None:
    verifier = TypicalVerifier(TypicalVerifier.Config(lossy=True, epsilon=0.09, delta=0.3))
    assert law(probs).entropy() == pytest.approx(entropy, abs=5e-4)
    assert verifier.threshold(law(probs)) == pytest.approx(threshold, abs=5e-5)


def test_the_most_probable_token_is_always_typical() -> None:
    verifier = TypicalVerifier()
    rng = np.random.default_rng(1)
    for _ in range(2000):
        probs = rng.dirichlet(np.full(rng.integers(2, 50), rng.uniform(0.05, 3)))
        assert probs.max() > verifier.threshold(law(probs))


def test_typical_takes_the_longest_path_and_then_the_most_probable() -> None:
    tokens, parents = (0, 1, 2, 3, 1, 2), (-1, -1, 0, 1, 3, 3)
    rows = [[0.4, 0.4, 0.1, 0.1], [0.01, 0.01, 0.97, 0.01], *([[0.05, 0.25, 0.5, 0.2]] * 5)]
    verdict = judge(TypicalVerifier(), Draft(tokens, parents), rows)
    assert verdict.path == (1, 3, 5)
    assert verdict.tokens == (1, 3, 2, 2)
    assert verdict.lossy == (0, 1)
    assert judge(TypicalVerifier(), Draft.chain([3]), [[0.98, 0.005, 0.005, 0.01]] * 2).path == ()


@pytest.mark.parametrize("verifier", [TypicalVerifier(), RelaxedVerifier(RelaxedVerifier.Config(delta=0.0, top_n=1))])
def test_neutral_knobs_are_exact(verifier: Verifier) -> None:
    params = SamplingParams(temperature=0, max_tokens=60)
    tokens, counts = run(verifier, noisy_trees("fixed", (2, 1, 1)), params)
    assert tokens == run(MatchVerifier(), noisy_trees("fixed", (2, 1, 1)), params)[0]
    assert counts["lossy"] == 0 < counts["accepted"]


# ---------------------------------------------------------------------------------------------- relaxed


def relaxed(**more: Any) -> RelaxedVerifier:
    return RelaxedVerifier(RelaxedVerifier.Config(**{"lossy": True, "top_n": 3, "delta": 0.25, **more}))


@pytest.mark.parametrize(
    ("token", "top_n", "is_accepted"),
    [(0, 3, True), (1, 3, True), (2, 3, False), (3, 3, False), (1, 1, False), (1, 2, True)],
)
def test_relaxed_takes_the_first_within_the_gap(token: int, top_n: int, is_accepted: bool) -> None:
    """p(1) lies exactly at the border of the gap."""
    row = [0.5, 0.3, 0.1, 0.1]
    p = law_of(_Rows([row]).row(0), History([], 0, SamplingParams(), 0)).probs
    verifier = relaxed(top_n=top_n, delta=float(p[0] - p[1]))
    for temperature in (0.0, 1.0):
        verdict = judge(verifier, Draft.chain([token]), [row] * 2, temperature)
        assert (verdict.path == (0,)) == is_accepted
        assert verdict.tokens == ((token, 0) if is_accepted else (0,))
        assert verdict.lossy == ((0,) if is_accepted and token != 0 else ())


def test_ties_take_the_lower_ids() -> None:
    rows = [[0.25] * 4] * 2
    assert [judge(relaxed(top_n=2), Draft.chain([token]), rows).path for token in range(4)] == [(0,), (0,), (), ()]


def test_relaxed_only_while_thinking() -> None:
    row = [0.4, 0.3, 0.2, 0.1]
    rows = [row] * 4
    thinking = relaxed(begin_id=2, end_id=0)
    # The committed tokens end with 2, so thinking is on; the own choice 0 ends it inside the draft.
    assert judge(thinking, Draft.chain([1, 0, 1]), rows).path == (0, 1)
    assert judge(relaxed(begin_id=3, end_id=2), Draft.chain([1, 1, 1]), rows).path == ()
    assert judge(relaxed(end_id=3), Draft.chain([1, 1, 1]), rows).path == (0, 1, 2)
    assert judge(relaxed(end_id=1), Draft.chain([1, 1, 1]), [[0.3, 0.4, 0.2, 0.1], *rows]).path == (0,)


def test_ends_are_never_relaxed() -> None:
    rows = [[0.5, 0.4, 0.1, 0.0]] * 2
    assert judge(relaxed(), Draft.chain([1]), rows).path == (0,)
    assert judge(relaxed(), Draft.chain([1]), rows, end_ids=frozenset({1})).path == ()
    assert judge(relaxed(begin_id=2, end_id=1), Draft.chain([1]), rows).path == ()


def test_planted_drafts_reach_the_counters() -> None:
    script = PlantedDrafter(PlantedDrafter.Config(script=lambda s, b: Draft.chain([1, 2, 3][:b])))
    verifier = RelaxedVerifier(RelaxedVerifier.Config(lossy=True, top_n=VOCAB, delta=1.0))
    tokens, counts = run(verifier, script, SamplingParams(temperature=0, max_tokens=8))
    assert counts == {"accepted": 6, "lossy": counts["lossy"], "steps": 2}
    assert counts["lossy"] > 2
    assert [tokens[3:6], tokens[7:10]] == [[1, 2, 3], [1, 2, 3]]


def test_lenient_refuses_trees_and_coupled_drafts() -> None:
    verifier = LenientVerifier()
    with pytest.raises(ParameterError, match="width=1"):
        judge(verifier, Draft((1, 2), (-1, -1)), [[0.5, 0.25, 0.25]] * 3)
    with pytest.raises(ParameterError, match="draw=independent"):
        judge(verifier, replace(Draft.chain([1]), drawn="coupled"), [[0.5, 0.25, 0.25]] * 2)


def test_the_bench_tells_a_lossy_rule() -> None:
    p, q = ConstantTable([0.6, 0.4]), ConstantTable([0.2, 0.8])
    law = one_token(p, lambda r: TreeDrafter(q, (1,), "independent", r), 0.5)
    assert law[1,] == pytest.approx(0.8, abs=1e-6)
