"""What the rules do with real noise: refusals, simple cases, keys, and the laws of rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from enumeration import Table, TreeDrafter
from hypothesis import given
from hypothesis import strategies as st

from sakiyomi.assemble import make_verifier
from sakiyomi.decode import prefill, step
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.drafters.none import NoneDrafter
from sakiyomi.drafters.planted import PlantedDrafter
from sakiyomi.errors import ParameterError, SakiyomiError, UnknownNameError
from sakiyomi.models.toy import ToyModel, random_law
from sakiyomi.noise import PURPOSE_ACCEPT, PURPOSE_DRAFT, NoiseKey, uniform
from sakiyomi.params import SamplingParams
from sakiyomi.sampling.choose import (
    choose,
    race,
    race_reference,
    rank,
    subtract,
    subtract_reference,
    toss,
    weigh,
    weigh_reference,
)
from sakiyomi.sampling.distributions import KeyedRandomness, Law, law_of
from sakiyomi.tree import Draft
from sakiyomi.types import Drafter, DrafterContext, History, Sequence, Verifier
from sakiyomi.verify.match import MatchVerifier

VOCAB = 9
RULES = ("rejection", "block", "tree", "traversal")
WARM = SamplingParams(temperature=1, max_tokens=40)


def run(verifier: Verifier, drafter: Drafter, params: SamplingParams = WARM, seed: int = 5) -> Sequence:
    model = ToyModel(random_law(VOCAB, 1, scale=2), VOCAB)
    sequence = Sequence("0", [3, 1, 4], 3, params, seed, model.new_cache())
    prefill(model, drafter, sequence)
    while sequence.finish_reason is None:
        step(model, drafter, verifier, [sequence], [16])
    return sequence


def second_model(draw: str = "independent", width: int = 1, law_seed: int = 2) -> ModelDrafter:
    model = ToyModel(random_law(VOCAB, law_seed, scale=2), VOCAB)
    config = ModelDrafter.Config(model="toy", draw=draw, width=width)  # type: ignore[arg-type]
    return ModelDrafter(config, DrafterContext(model, lambda name: model))


def test_names_and_what_they_promise() -> None:
    promises = {name: make_verifier(name).is_lossless for name in ("match", *RULES)}
    assert promises == {"match": "tokens"} | dict.fromkeys(RULES, "distribution")
    with pytest.raises(UnknownNameError, match="block, lenient, match, rejection, relaxed, traversal, tree, typical"):
        make_verifier("rejecton")


@pytest.mark.parametrize("rule", RULES)
def test_temperature_zero_and_certain_drafts_are_plain_decoding(rule: str) -> None:
    """Also with drafts of every kind between them: the tokens are those of no draft."""
    greedy = SamplingParams(temperature=0, max_tokens=40)
    any_kind = [second_model(), second_model("coupled"), second_model(width=2)]
    for params, drafters in ((greedy, any_kind), (WARM, [second_model("argmax"), second_model("argmax", 2)])):
        plain = run(MatchVerifier(), NoneDrafter(), params)
        for drafter in drafters:
            assert run(make_verifier(rule), drafter, params).tokens == plain.tokens


@pytest.mark.parametrize("rule", RULES)
def test_coupled_drafts_are_refused_with_the_remedy(rule: str) -> None:
    with pytest.raises(ParameterError, match=f"{rule} cannot judge drafts that share.*draw=independent.*match"):
        run(make_verifier(rule), second_model("coupled"))


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_chains_alone(rule: str) -> None:
    with pytest.raises(ParameterError, match=f"{rule} judges chains.*traversal.*width=1"):
        run(make_verifier(rule), second_model(width=2))


@pytest.mark.parametrize("rule", RULES)
def test_the_target_as_its_own_drafter_is_always_accepted(rule: str) -> None:
    drafter = second_model(law_seed=1)
    model = ToyModel(random_law(VOCAB, 1, scale=2), VOCAB)
    sequence = Sequence("0", [3, 1, 4], 3, WARM, 5, model.new_cache())
    prefill(model, drafter, sequence)
    for number in range(8):
        assert sequence.num_steps == number
        done = step(model, drafter, make_verifier(rule), [sequence], [16])[0]
        assert done.num_accepted == done.num_draft == 4


@pytest.mark.parametrize("rule", RULES)
def test_text_is_a_function_of_seed_and_drafts(rule: str) -> None:
    width = 2 if rule in ("tree", "traversal") else 1
    texts = [run(make_verifier(rule), second_model(width=width), seed=seed).tokens for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert run(make_verifier(rule), second_model(width=width, law_seed=3), seed=1).tokens != texts[0]


def test_equal_rules_decide_alike_with_equal_noise() -> None:
    for seed in range(10):
        chain = second_model()
        texts = {rule: run(make_verifier(rule), chain, seed=seed).tokens for rule in RULES}
        assert texts["tree"] == texts["rejection"]
        assert texts["traversal"] == texts["block"]


@pytest.mark.parametrize("rule", RULES)
def test_repeated_draws_with_real_noise(rule: str) -> None:
    table = Table(VOCAB, 3)
    shape = (1, 1) if rule in ("rejection", "block") else (4, 2)
    drafter = TreeDrafter(table, shape, "without_replacement", _Spread())
    drafter.kind = "independent"
    assert run(make_verifier(rule), drafter).num_new == 40


class _Spread(KeyedRandomness):
    """Real noise for the keys of the bench."""

    def draw(self, key: Any, ids: Any, probs: Any, count: int = 1) -> list[int]:
        if not isinstance(key, NoiseKey):
            key = key[0]._replace(seed=key[0].seed + key[2])
        return super().draw(key, ids, probs, count)


def test_a_broken_law_costs_speed_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    broken = replace(Draft.chain([1, 2], "independent"), probs=[np.full(VOCAB, np.nan)] * 2)
    drafter = PlantedDrafter(PlantedDrafter.Config(script=lambda s, b: broken))
    assert run(make_verifier("block"), drafter).tokens == run(MatchVerifier(), NoneDrafter()).tokens
    assert "PlantedDrafter failed" in caplog.text


# ---------------------------------------------------------------------------------------------- keys


def test_keys_differ_by_every_part_and_never_return() -> None:
    keys = [
        NoiseKey(seed, step, node, purpose)
        for seed in (0, 1, 2**64 - 1)
        for step in (0, 1, 2**32 - 1)
        for node in (-1, 0, 1, 63)
        for purpose in (PURPOSE_DRAFT, PURPOSE_ACCEPT)
    ]
    numbers = [uniform(key) for key in keys]
    assert len(set(numbers)) == len(keys)
    assert all(0 <= number < 1 for number in numbers)


def test_a_later_turn_has_other_keys() -> None:
    first = run(make_verifier("block"), second_model())
    seen = {first.num_prompt + number for number in range(first.num_steps)}
    second = replace(first, num_prompt=len(first.tokens), num_steps=0)
    assert second.noise_key(0, PURPOSE_DRAFT).step not in seen


def test_coins_are_fair_and_zero_is_never_accepted() -> None:
    noise = KeyedRandomness()
    keys = [NoiseKey(9, step, 0, PURPOSE_ACCEPT) for step in range(4000)]
    share = sum(noise.flip(key, 0.15, 0.5) for key in keys) / len(keys)
    assert share == pytest.approx(0.3, abs=0.03)  # 4 standard deviations
    assert not any(noise.flip(key, 0.0, q) for key in keys[:500] for q in (1.0, 1e-300, 0.0))
    assert all(noise.flip(key, p, p) for key in keys for p in (1.0, 0.3))
    assert all(noise.flip(key, 1e-310, 0.0) for key in keys[:500])


def test_draws_follow_their_law_without_replacement() -> None:
    noise, probs = KeyedRandomness(), np.array([0.5, 0.3, 0.2, 0.0])
    ids = np.array([2, 5, 7, 8])
    drawn = [noise.draw(NoiseKey(4, step, -1, PURPOSE_DRAFT), ids, probs, 2) for step in range(4000)]
    assert all(len(set(pair)) == 2 for pair in drawn)
    share = sum(pair == [2, 5] for pair in drawn) / len(drawn)
    assert share == pytest.approx(0.5 * 0.3 / 0.5, abs=0.03)
    assert sorted(noise.draw(NoiseKey(4, 0, 0, PURPOSE_DRAFT), ids, probs, 9)) == [2, 5, 7]
    assert [pair[0] for pair in drawn] == [
        noise.draw(NoiseKey(4, step, -1, PURPOSE_DRAFT), ids, probs)[0] for step in range(4000)
    ]


# ---------------------------------------------------------------------------------------------- laws of rows

some_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 4]),
    top_p=st.sampled_from([1.0, 0.7]),
    min_p=st.sampled_from([0.0, 0.2]),
    frequency_penalty=st.sampled_from([0.0, 1.0]),
)


@given(params=some_params, seed=st.integers(0, 1000))
def test_the_law_of_a_row_is_what_choose_draws_from(params: SamplingParams, seed: int) -> None:
    row = np.random.default_rng(seed).normal(0, 2, VOCAB).astype(np.float32)
    history = History([1, 2, 2], 1, params, seed)
    law = law_of(row, history)
    assert law.probs.sum() == pytest.approx(1, abs=1e-12)
    chosen = [choose(row, replace(history, seed=seed)) for seed in range(40)]
    assert all(law.probability(token) > 0 for token in chosen)
    if params.is_greedy:
        assert law.ids.tolist() == [chosen[0]]
    ids, confidences = rank(row, history, 4)
    assert ids[0] == choose(row, history)
    assert len(set(ids)) == len(ids)
    assert confidences == sorted(confidences, reverse=True)
    assert np.exp(confidences).sum() <= 1 + 1e-12


def test_verbs_of_a_law() -> None:
    p = Law(np.array([1, 4, 6]), np.array([0.5, 0.3, 0.2]), 8)
    q = Law(np.array([1, 2]), np.array([0.9, 0.1]), 8)
    rest, mass = p.residual(q)
    assert (rest.ids.tolist(), rest.probs.tolist(), mass) == ([1, 4, 6], pytest.approx([0, 0.6, 0.4]), 0.5)
    assert p.residual(p) == (p, 0.0)
    assert p.residual(q, 0.5)[1] == pytest.approx(0.25)
    assert p.without(1).probability(4) == pytest.approx(0.6)
    assert p.without(3).probs.tolist() == p.probs.tolist()
    assert [p.probability(token) for token in (0, 1, 5, 6, 7)] == [0, 0.5, 0, 0.2, 0]
    assert p.row().tolist() == [0, 0.5, 0, 0, 0.3, 0, 0.2, 0]
    only = Law.one_hot(3, 8)
    assert only.without(3) is only


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_damaged_rows_are_errors(bad: float) -> None:
    row = np.full(VOCAB, bad, np.float32)
    for call in (law_of, lambda r, h: rank(r, h, 2)):
        with pytest.raises(SakiyomiError):
            call(row, History([1], 1, WARM, 0))


# ---------------------------------------------------------------------------------------------- native and numpy


@given(
    params=some_params.filter(lambda params: not params.is_greedy), seed=st.integers(0, 1000), size=st.integers(1, 300)
)
def test_native_laws_and_races_are_numpys_bit_for_bit(params: SamplingParams, seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    row = rng.choice([rng.normal(0, 3, size), rng.integers(-2, 3, size)]).astype(np.float32)
    row[rng.random(size) < 0.2] = -np.inf
    row[rng.integers(size)] = rng.choice([1.0, np.inf])
    ids, weights = weigh(row, History([], 0, replace(params, frequency_penalty=0), seed))
    expected = weigh_reference(row, params)
    assert ids.tolist() == expected[0].tolist()
    assert weights.tobytes() == expected[1].tobytes()
    for scale in (1.0, 1e-300):
        key = NoiseKey(seed, 2, 3, PURPOSE_DRAFT)
        for count in (1, 3, size):
            assert race(ids, weights * scale, key, count) == race_reference(ids, weights * scale, key, count)


@given(seed=st.integers(0, 10**6), size=st.sampled_from([3, 90, 1000]), scale=st.sampled_from([1.0, 0.37, 1e-300]))
def test_native_residuals_are_numpys_bit_for_bit(seed: int, size: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    ids = [np.flatnonzero(rng.random(size) < share) for share in rng.choice([0.01, 0.5, 1.0], 2)]
    p, q = (Law(i, rng.dirichlet(np.ones(i.size)), size) for i in (i if i.size else np.array([size - 1]) for i in ids))
    rest, mass = subtract(p.ids, p.probs, q.ids, q.probs, scale)
    expected, expected_mass = subtract_reference(p.ids, p.probs, q.ids, q.probs, scale)
    assert rest.tobytes() == expected.tobytes() == np.maximum(scale * p.probs - q.at(p.ids), 0.0).tobytes()
    assert mass == expected_mass == pytest.approx(rest.sum(), rel=1e-12)


def test_native_coins_are_numpys() -> None:
    keys = [NoiseKey(2**64 - 1 - step, step, node, PURPOSE_ACCEPT) for step in range(50) for node in (-1, 0, 2**31)]
    assert [toss(key) for key in keys] == [uniform(key) for key in keys]


def test_long_races_are_numpys_too() -> None:
    """Long enough for noise that is never evaluated, by its bound."""
    rng = np.random.default_rng(0)
    ids = np.sort(rng.permutation(40000)[:20000])
    for step_number in range(40):
        probs = rng.dirichlet(np.full(ids.size, rng.choice([0.01, 1.0])))
        key = NoiseKey(1, step_number, 0, PURPOSE_DRAFT)
        assert race(ids, probs, key, 2) == race_reference(ids, probs, key, 2)
