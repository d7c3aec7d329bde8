"""The step against plain decoding, on a toy whose caches and rows are real."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sakiyomi.decode import Step, prefill, propose, step
from sakiyomi.drafters.none import NoneDrafter
from sakiyomi.drafters.planted import PlantedDrafter, Script, follow, scatter
from sakiyomi.models.toy import ToyModel, random_law, scripted_law
from sakiyomi.params import SamplingParams
from sakiyomi.tree import Draft
from sakiyomi.types import Drafter, Sequence
from sakiyomi.verify.match import MatchVerifier

VOCAB = 13
EOS = 0
PROMPT = (3, 1, 4, 1, 5)


def start(model: ToyModel, params: SamplingParams, prompt: Seq[int] = PROMPT, seed: int = 7) -> Sequence:
    ends = frozenset(() if params.ignore_eos else model.info.end_token_ids) | frozenset(params.stop_token_ids or ())
    return Sequence("0", list(prompt), len(prompt), params, seed, model.new_cache(), ends)


def run(model: ToyModel, drafter: Drafter, sequence: Sequence, budget: int = 64) -> list[Step]:
    prefill(model, drafter, sequence, chunk=2)
    steps = []
    while sequence.finish_reason is None:
        assert sequence.cache.length == len(sequence.tokens) - 1
        steps += step(model, drafter, MatchVerifier(), [sequence], [budget])
    assert sequence.cache.length == len(sequence.tokens) - 1
    assert sequence.cache.tokens == sequence.tokens[:-1]
    return steps


def planted(script: Script) -> PlantedDrafter:
    return PlantedDrafter(PlantedDrafter.Config(script=script))


def answer(model: ToyModel, params: SamplingParams, prompt: Seq[int] = PROMPT) -> Sequence:
    sequence = start(model, params, prompt)
    run(model, NoneDrafter(), sequence)
    return sequence


many_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    top_k=st.sampled_from([0, 3]),
    min_p=st.sampled_from([0.0, 0.2]),
    frequency_penalty=st.sampled_from([0.0, 2.0]),
    presence_penalty=st.sampled_from([0.0, -1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    logit_bias=st.sampled_from([None, {2: -100.0, 5: 3.0}]),
    min_tokens=st.sampled_from([0, 6]),
    max_tokens=st.integers(6, 20),
    logprobs=st.sampled_from([None, 3]),
    ignore_eos=st.booleans(),
)


@given(params=many_params, law_seed=st.integers(0, 50), seed=st.integers(0, 50), num_nodes=st.integers(1, 9))
def test_random_trees_change_nothing(params: SamplingParams, law_seed: int, seed: int, num_nodes: int) -> None:
    model = ToyModel(random_law(VOCAB, law_seed, scale=1.5), VOCAB, end_token_ids=(EOS,))
    plain, drafted = start(model, params), start(model, params)
    plain_steps = run(model, NoneDrafter(), plain)
    truth = {PROMPT: plain.tokens[len(PROMPT) :]}
    steps = run(model, planted(scatter(truth, num_nodes, VOCAB, seed)), drafted)
    assert drafted.tokens == plain.tokens
    assert (drafted.finish_reason, drafted.stop_reason) == (plain.finish_reason, plain.stop_reason)
    if params.logprobs is not None:
        assert [x for s in steps for x in s.logprobs] == [x for s in plain_steps for x in s.logprobs]


@pytest.mark.parametrize("num_tokens", [1, 3, 8])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_truth_is_accepted_whole(num_tokens: int, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=24, ignore_eos=True)
    model = ToyModel(random_law(VOCAB, 1), VOCAB)
    plain = answer(model, params)
    sequence = start(model, params)
    steps = run(model, planted(follow({PROMPT: plain.tokens[len(PROMPT) :]}, num_tokens)), sequence)
    assert sequence.tokens == plain.tokens
    assert all(s.num_accepted == s.num_draft for s in steps)
    assert len(steps) == -(-24 // (num_tokens + 1))


def test_an_end_id_inside_an_accepted_block_ends_there() -> None:
    script = [5, 6, 7, 8, EOS, 9, 9, 9]
    model = ToyModel(scripted_law(VOCAB, script, start=len(PROMPT)), VOCAB, end_token_ids=(EOS,))
    sequence = start(model, SamplingParams(temperature=0, max_tokens=50, logprobs=2))
    steps = run(model, planted(lambda s, b: Draft.chain(script[s.num_new :][:b])), sequence)
    assert sequence.tokens[len(PROMPT) :] == [5, 6, 7, 8, EOS]
    assert (sequence.finish_reason, sequence.stop_reason) == ("stop", None)
    assert [(s.tokens, s.num_accepted, s.num_draft, len(s.logprobs)) for s in steps] == [((5, 6, 7, 8, EOS), 5, 8, 5)]


def test_ignored_ends_and_min_tokens() -> None:
    script = [5, EOS, 7, EOS, 9, EOS]
    law = scripted_law(VOCAB, script, start=len(PROMPT))
    model = ToyModel(law, VOCAB, end_token_ids=(EOS,))
    ignoring = answer(model, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    assert ignoring.tokens[len(PROMPT) :] == script
    waiting = answer(model, SamplingParams(temperature=0, max_tokens=6, min_tokens=3))
    assert waiting.tokens[len(PROMPT) :][:1] == [5]
    assert waiting.tokens[len(PROMPT) + 1] != EOS
    assert waiting.tokens[len(PROMPT) + 3] == EOS
    assert waiting.finish_reason == "stop"


@pytest.mark.parametrize(("stop_at", "max_tokens", "reason"), [(3, 5, "stop"), (5, 3, "length"), (4, 4, "stop")])
def test_what_comes_first_in_a_block_decides(stop_at: int, max_tokens: int, reason: str) -> None:
    script = [5] * 8
    script[stop_at - 1] = 11
    model = ToyModel(scripted_law(VOCAB, script, start=len(PROMPT)), VOCAB)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, stop_token_ids=[11])
    sequence = start(model, params)
    run(model, planted(lambda s, b: Draft.chain(script[s.num_new :])), sequence)
    assert sequence.num_new == min(stop_at, max_tokens)
    assert sequence.finish_reason == reason
    assert sequence.stop_reason == (11 if reason == "stop" else None)


def test_the_end_of_the_context_cuts_any_draft() -> None:
    model = ToyModel(scripted_law(VOCAB, {}, other=4), VOCAB, max_model_len=len(PROMPT) + 7)
    sequence = start(model, SamplingParams(temperature=0, max_tokens=None))
    run(model, planted(lambda s, b: Draft.chain([4] * 16)), sequence)
    assert sequence.num_new == 7
    assert sequence.finish_reason == "length"


def test_a_finished_sequence_can_go_on() -> None:
    """After any finish the cache holds what a fresh prefill would."""
    model = ToyModel(random_law(VOCAB, 3), VOCAB)
    long = answer(model, SamplingParams(temperature=1, max_tokens=30))
    truth = {PROMPT: long.tokens[len(PROMPT) :]}
    sequence = start(model, SamplingParams(temperature=1, max_tokens=11))
    run(model, planted(follow(truth, 8)), sequence)
    sequence.params, sequence.finish_reason = SamplingParams(temperature=1, max_tokens=30), None
    run(model, planted(follow(truth, 8)), sequence)
    assert sequence.tokens == long.tokens


class RecordingDrafter(PlantedDrafter):
    """Sees every committed position once, in order, with its own taps."""

    taps = (0, 2)

    def __init__(self, script: Script) -> None:
        super().__init__(self.Config(script=script))
        self.seen: list[tuple[int, int]] = []

    def observe(self, sequence: Sequence, start: int, tokens: Seq[int], taps: object) -> None:
        assert start == len(self.seen)
        for offset, token in enumerate(tokens):
            assert list(taps[offset]) == [0, start + offset, token, 2, start + offset, token]  # type: ignore[index]
            self.seen.append((start + offset, token))


@given(seed=st.integers(0, 100))
def test_drafters_observe_every_position_once(seed: int) -> None:
    model = ToyModel(random_law(VOCAB, 5), VOCAB)
    params = SamplingParams(temperature=0, max_tokens=20)
    truth = {PROMPT: answer(model, params).tokens[len(PROMPT) :]}
    drafter = RecordingDrafter(scatter(truth, 6, VOCAB, seed))
    sequence = start(model, params)
    run(model, drafter, sequence)
    assert drafter.seen == list(enumerate(sequence.tokens[:-1]))


@pytest.mark.parametrize(
    "script",
    [
        lambda s, b: Draft.chain([VOCAB]),
        lambda s, b: Draft.chain([-1]),
        lambda s, b: Draft((1, 1), (-1, -1)),
        lambda s, b: Draft((1, 2), (1, -1)),
        lambda s, b: 1 / 0,
    ],
    ids=["id too large", "id negative", "twin siblings", "parent after child", "raises"],
)
def test_a_broken_drafter_costs_speed_and_is_reported_once(script: Script, caplog: pytest.LogCaptureFixture) -> None:
    model = ToyModel(random_law(VOCAB, 5), VOCAB)
    params = SamplingParams(temperature=0, max_tokens=9)
    sequence = start(model, params)
    with caplog.at_level(logging.WARNING, logger="sakiyomi"):
        run(model, planted(script), sequence)
    assert sequence.tokens == answer(model, params).tokens
    assert len(caplog.records) == 1
    assert "PlantedDrafter failed" in caplog.text


def test_neighbours_in_a_step_do_not_matter() -> None:
    model = ToyModel(random_law(VOCAB, 8), VOCAB)
    prompts = [(1, 2), (3, 4, 5, 6), (7,), (8, 9, 10)]
    params = [SamplingParams(temperature=t, max_tokens=12) for t in (0.0, 1.0, 0.7, 1.5)]
    alone = [answer(model, own, prompt) for own, prompt in zip(params, prompts, strict=True)]
    truth = {prompt: one.tokens[len(prompt) :] for prompt, one in zip(prompts, alone, strict=True)}
    together = [start(model, own, prompt) for own, prompt in zip(params, prompts, strict=True)]
    drafter = planted(scatter(truth, 5, VOCAB, 1))
    for sequence in together:
        prefill(model, drafter, sequence)
    while any(s.finish_reason is None for s in together):
        running = [s for s in together if s.finish_reason is None]
        step(model, drafter, MatchVerifier(), running, [5] * len(running))
    assert [s.tokens for s in together] == [s.tokens for s in alone]


def test_a_model_that_takes_no_trees_is_given_chains_or_nothing() -> None:
    model = ToyModel(random_law(8, seed=1), 8)
    drafter = planted(lambda *_: Draft.from_paths([[1], [2, 3], [2, 1]]))
    sequence = start(model, SamplingParams(max_tokens=32))
    info = replace(model.info, draft_shape="chains")
    assert propose(drafter, [sequence], [8], info) == [Draft.chain([2, 3])]
    assert propose(drafter, [sequence], [8], replace(model.info, draft_shape="none")) == [Draft.empty()]
