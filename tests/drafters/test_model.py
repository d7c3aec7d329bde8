"""The drafting model: with the target as its own drafter every draft is accepted, so an offset of one would show."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq

import pytest

from sakiyomi.decode import Step, prefill, step
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.drafters.none import NoneDrafter
from sakiyomi.errors import ParameterError
from sakiyomi.models.toy import ToyModel, random_law
from sakiyomi.params import SamplingParams
from sakiyomi.sampling.distributions import law_of
from sakiyomi.tree import Draft
from sakiyomi.types import Drafter, DrafterContext, Sequence
from sakiyomi.verify.match import MatchVerifier

VOCAB = 17
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
ALL_PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=40),
    "warm": SamplingParams(temperature=0.7, max_tokens=40),
    "nucleus": SamplingParams(temperature=1, top_p=0.9, max_tokens=40),
    "penalties": SamplingParams(
        temperature=1, max_tokens=40, frequency_penalty=0.7, presence_penalty=0.3, repetition_penalty=1.3
    ),
}


def make(model: ToyModel, num_tokens: int = 4) -> ModelDrafter:
    config = ModelDrafter.Config(model="itself", num_speculative_tokens=num_tokens)
    return ModelDrafter(config, DrafterContext(model, lambda name: model))


def start(model: ToyModel, params: SamplingParams) -> Sequence:
    return Sequence("0", list(PROMPT), len(PROMPT), params, 11, model.new_cache())


def run(model: ToyModel, drafter: Drafter, sequence: Sequence, num_steps: int = 1000) -> list[Step]:
    prefill(model, drafter, sequence)
    steps: list[Step] = []
    while sequence.finish_reason is None and len(steps) < num_steps:
        steps += step(model, drafter, MatchVerifier(), [sequence], [64])
    return steps


class SpoilingDrafter(ModelDrafter):
    """Replaces the third drafted token by a wrong one in every other step."""

    num_calls = 0

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        self.num_calls += 1
        drafts = super().propose(sequences, budgets)
        if self.num_calls % 2 == 0:
            return drafts
        return [Draft.chain([*d.tokens[:2], *((t + 1) % VOCAB for t in d.tokens[2:])]) for d in drafts]


@pytest.mark.parametrize("params", ALL_PARAMS.values(), ids=ALL_PARAMS.keys())
def test_the_target_as_its_own_drafter_is_always_right(params: SamplingParams) -> None:
    model = ToyModel(random_law(VOCAB, 2), VOCAB)
    plain, drafted = start(model, params), start(model, params)
    run(model, NoneDrafter(), plain)
    steps = run(model, make(model), drafted)
    assert drafted.tokens == plain.tokens
    assert [(s.num_accepted, s.num_draft) for s in steps] == [(4, 4)] * 8


@pytest.mark.parametrize("params", ALL_PARAMS.values(), ids=ALL_PARAMS.keys())
def test_also_after_a_partial_rejection(params: SamplingParams) -> None:
    model = ToyModel(random_law(VOCAB, 2), VOCAB)
    config = ModelDrafter.Config(model="itself")
    drafter = SpoilingDrafter(config, DrafterContext(model, lambda name: model))
    sequence = start(model, params)
    steps = run(model, drafter, sequence)
    assert [s.num_accepted for s in steps[1::2]] == [s.num_draft for s in steps[1::2]]
    assert all(s.num_accepted == 2 for s in steps[0:-2:2])
    plain = start(model, params)
    run(model, NoneDrafter(), plain)
    assert sequence.tokens == plain.tokens


def test_also_after_steps_without_drafts_and_after_a_rewind() -> None:
    model = ToyModel(random_law(VOCAB, 2), VOCAB)
    drafter = make(model)
    sequence = start(model, ALL_PARAMS["nucleus"])
    run(model, drafter, sequence, 2)
    for _ in range(3):
        step(model, drafter, MatchVerifier(), [sequence], [0])
    assert run(model, drafter, sequence, 1)[0].num_accepted == 4
    sequence.tokens = [*sequence.tokens[:10], 3, 3, 3, 3]
    sequence.cache.truncate(10)
    drafter.rewind(sequence, 10)
    assert run(model, drafter, sequence, 1)[0].num_accepted == 4


def test_an_exhausted_context_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    target = ToyModel(random_law(VOCAB, 2), VOCAB)
    small = ToyModel(random_law(VOCAB, 2), VOCAB, max_model_len=len(PROMPT) + 10)
    drafter = ModelDrafter(ModelDrafter.Config(model="small"), DrafterContext(target, lambda name: small))
    sequence = start(target, ALL_PARAMS["greedy"])
    with caplog.at_level(logging.WARNING, logger="sakiyomi"):
        steps = run(target, drafter, sequence)
    assert sequence.num_new == 40
    assert [s.num_draft for s in steps][:3] == [4, 4, 1]
    assert all(s.num_draft == 0 for s in steps[3:])
    assert [record.message for record in caplog.records if "exhausted" in record.message] == [caplog.records[0].message]
    assert len(caplog.records) == 1


def test_drafting_stops_at_an_end_id() -> None:
    model = ToyModel(random_law(VOCAB, 2), VOCAB)
    plain = start(model, ALL_PARAMS["greedy"])
    run(model, NoneDrafter(), plain)
    sequence = start(model, ALL_PARAMS["greedy"])
    sequence.end_ids = frozenset([plain.tokens[len(PROMPT) + 1]])
    steps = run(model, make(model), sequence)
    assert [(s.num_accepted, s.num_draft) for s in steps] == [(2, 2)]


@pytest.mark.parametrize("draw", ["argmax", "coupled", "independent"])
def test_trees_hold_the_chain_of_their_first_children(draw: str) -> None:
    """A tree of the target's own: the greedy and the coupled one contain the whole future, of any kind all is kept."""
    model = ToyModel(random_law(VOCAB, 2), VOCAB)
    params = ALL_PARAMS["greedy" if draw == "argmax" else "penalties"]
    config = ModelDrafter.Config(model="itself", num_speculative_tokens=3, width=2, max_nodes=9, draw=draw)
    drafter = ModelDrafter(config, DrafterContext(model, lambda name: model))
    sequence = start(model, params)
    prefill(model, drafter, sequence)
    draft = drafter.propose([sequence], [64])[0]
    draft.check(VOCAB)
    assert (len(draft), max(draft.depths)) == (9, 3)
    if draw == "independent":
        assert draft.drawn == "without_replacement"
        for node, (token, probs, ids) in enumerate(zip(draft.tokens, draft.probs, draft.probs_ids, strict=True)):
            path = tuple(draft.tokens[n] for n in draft.path(draft.parents[node]))
            law = law_of(model.law([*sequence.tokens, *path]), sequence.history(path))
            assert (ids.tolist(), probs.tolist()) == (law.ids.tolist(), law.probs.tolist())
            assert law.probability(token) > 0
        return
    steps = run(model, drafter, sequence, 3)
    assert [s.num_accepted for s in steps] == [3, 3, 3]


def test_a_wide_draft_keeps_to_its_budget() -> None:
    model = ToyModel(random_law(VOCAB, 2), VOCAB)
    for draw in ("argmax", "coupled", "independent"):
        config = ModelDrafter.Config(model="itself", num_speculative_tokens=4, width=3, draw=draw)
        drafter = ModelDrafter(config, DrafterContext(model, lambda name: model))
        sequence = start(model, ALL_PARAMS["warm"])
        prefill(model, drafter, sequence)
        for budget in (0, 1, 2, 4, 7, 50):
            draft = drafter.propose([sequence], [budget])[0]
            assert len(draft) == min(budget, 24)
            assert max(draft.depths, default=0) <= min(budget, 4)


def test_the_verifier_settles_how_tokens_are_drawn() -> None:
    model = ToyModel(random_law(VOCAB, 2), VOCAB)
    drawn = {}
    for wish in ("argmax", "coupled", "independent"):
        for own in ("auto", "argmax"):
            config = ModelDrafter.Config(model="itself", draw=own)
            drafter = ModelDrafter(config, DrafterContext(model, lambda name: model, wish))
            sequence = start(model, ALL_PARAMS["warm"])
            prefill(model, drafter, sequence)
            drawn[wish, own] = drafter.propose([sequence], [4])[0].drawn
    assert drawn == {
        ("argmax", "auto"): "fixed",
        ("argmax", "argmax"): "fixed",
        ("coupled", "auto"): "coupled",
        ("coupled", "argmax"): "fixed",
        ("independent", "auto"): "independent",
        ("independent", "argmax"): "fixed",
    }


@pytest.mark.parametrize("wrong", [{"width": 0}, {"max_nodes": 0}, {"num_speculative_tokens": 0}, {"draw": "soft"}])
def test_wrong_options_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ParameterError, match=next(iter(wrong))):
        ModelDrafter.Config(model="itself", **wrong)


def test_several_sequences_draft_in_the_same_passes() -> None:
    model = ToyModel(random_law(VOCAB, 2), VOCAB)
    drafter = make(model)
    sequences = [start(model, params) for params in ALL_PARAMS.values()]
    for sequence in sequences:
        prefill(model, drafter, sequence)
    steps = step(model, drafter, MatchVerifier(), sequences, [4, 2, 0, 3])
    assert [(s.num_accepted, s.num_draft) for s in steps] == [(4, 4), (2, 2), (0, 0), (3, 3)]
