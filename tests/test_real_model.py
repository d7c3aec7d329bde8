"""SmolLM2 on the native backend: its own drafter is never wrong, and any finish leaves the cache of a fresh prefill."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sakiyomi import LLM, SamplingParams
from sakiyomi.assemble import LoadedModel, ModelOptions, load_model
from sakiyomi.decode import prefill, step
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.drafters.none import NoneDrafter
from sakiyomi.drafters.planted import PlantedDrafter
from sakiyomi.ops.native import NativeOps
from sakiyomi.text.detokenizer import Detokenizer
from sakiyomi.text.stops import TextStream
from sakiyomi.tree import Draft
from sakiyomi.types import Drafter, DrafterContext, Sequence, Span
from sakiyomi.verify.match import MatchVerifier

QUESTION = [{"role": "user", "content": "Name three rivers, then name them again."}]


@pytest.fixture(scope="module")
def loaded(model_path: Path) -> LoadedModel:
    return load_model(str(model_path), ModelOptions())


@pytest.fixture(scope="module")
def prompt(loaded: LoadedModel) -> list[int]:
    return LLM.from_loaded(loaded).render(QUESTION)


def itself(loaded: LoadedModel) -> ModelDrafter:
    return ModelDrafter(ModelDrafter.Config(model="itself"), DrafterContext(loaded.model, lambda name: loaded.model))


ALL_PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=20),
    "warm": SamplingParams(temperature=0.7, seed=1, max_tokens=20),
    "hot": SamplingParams(temperature=1, seed=2, max_tokens=20),
    "nucleus": SamplingParams(temperature=1, top_p=0.9, seed=6, max_tokens=20),
    "penalties": SamplingParams(
        temperature=0.8,
        seed=4,
        max_tokens=20,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
        logit_bias={260: 2.0},
        min_p=0.01,
        top_k=500,
    ),
}


@pytest.mark.parametrize("params", ALL_PARAMS.values(), ids=ALL_PARAMS.keys())
def test_its_own_drafter_is_always_right(loaded: LoadedModel, prompt: list[int], params: SamplingParams) -> None:
    plain = LLM.from_loaded(loaded).generate(prompt, params)[0]
    drafted = LLM.from_loaded(loaded, drafter=itself(loaded)).generate(prompt, params)[0]
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    stats = drafted.speculation
    assert stats.num_accepted_tokens == stats.num_draft_tokens
    assert stats.mean_acceptance_length > 4


def test_also_in_a_second_turn(loaded: LoadedModel) -> None:
    session = LLM.from_loaded(loaded, drafter=itself(loaded)).session()
    params = SamplingParams(temperature=1, top_p=0.9, seed=5, max_tokens=16)
    for text in ("Hello!", "Say it in French."):
        output = list(session.stream(text, params))[-1].output
        assert output is not None
        assert output.speculation.num_accepted_tokens == output.speculation.num_draft_tokens > 0
    fresh = LLM.from_loaded(loaded).chat(session.messages[:-1], params)[0]
    assert fresh.outputs[0].token_ids == output.outputs[0].token_ids


class HalfWrong(ModelDrafter):
    """Spoils the third token of every draft."""

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        return [
            Draft.chain([*d.tokens[:2], *(token ^ 1 for token in d.tokens[2:3]), *d.tokens[3:]])
            for d in super().propose(sequences, budgets)
        ]


def test_also_after_partial_rejections(loaded: LoadedModel, prompt: list[int]) -> None:
    params = SamplingParams(temperature=1, top_p=0.9, seed=6, max_tokens=21)
    drafter = HalfWrong(ModelDrafter.Config(model="itself"), DrafterContext(loaded.model, lambda name: loaded.model))
    plain = LLM.from_loaded(loaded).generate(prompt, params)[0]
    drafted = LLM.from_loaded(loaded, drafter=drafter).generate(prompt, params)[0]
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert drafted.speculation.acceptance_per_position == [1.0, 1.0]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_auto_gives_the_tokens_of_plain_decoding_while_its_budget_learns(
    loaded: LoadedModel, temperature: float
) -> None:
    plain, auto = LLM.from_loaded(loaded), LLM.from_loaded(loaded, drafter="auto", max_num_seqs=2)
    text = "Repeat this twice: the cat sat on the mat, the dog sat on the log, the hen sat on the pen."
    prompts = [plain.render([{"role": "user", "content": text}]), plain.render([{"role": "user", "content": "Hello!"}])]
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=48)
    expected = plain.generate(prompts, params)
    found = auto.generate(prompts, params)
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in expected]
    assert found[0].speculation.drafter == "auto"
    assert found[0].speculation.num_accepted_tokens > 0


# ---------------------------------------------------------------------------------------------- finishes


def run(loaded: LoadedModel, prompt: list[int], params: SamplingParams, drafter: Drafter) -> Sequence:
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    ends = frozenset((*loaded.model.info.end_token_ids, *(params.stop_token_ids or ())))
    text = TextStream(Detokenizer(tokenizer), params.stop_strings, params.include_stop_str_in_output)
    sequence = Sequence("0", list(prompt), len(prompt), params, 9, loaded.model.new_cache(), ends, text)
    prefill(loaded.model, drafter, sequence)
    while sequence.finish_reason is None:
        step(loaded.model, drafter, MatchVerifier(), [sequence], [64])
    return sequence


def next_logits(loaded: LoadedModel, sequence: Sequence) -> np.ndarray:
    tail = sequence.tokens[sequence.cache.length :]
    assert len(tail) == 1
    return loaded.model.forward([Span(sequence.cache, tail, [-1], [0])])[0].row(0)


def finishing_params(answer: list[int], loaded: LoadedModel) -> dict[str, SamplingParams]:
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    third_and_fourth = tokenizer.decode(answer[2:4])
    return {
        "end id as the 5th of a block of 8": SamplingParams(temperature=0, stop_token_ids=[answer[4]]),
        "stop string": SamplingParams(temperature=0, stop=third_and_fourth),
        "stop string kept": SamplingParams(temperature=0, stop=third_and_fourth, include_stop_str_in_output=True),
        "stop before length": SamplingParams(temperature=0, stop=third_and_fourth, max_tokens=6),
        "length before stop": SamplingParams(temperature=0, stop=third_and_fourth, max_tokens=3),
        "forbidden": SamplingParams(temperature=0, logit_bias={answer[2]: -100.0}, max_tokens=6),
        "min_p": SamplingParams(temperature=1, min_p=0.3, max_tokens=6),
        "frequency": SamplingParams(temperature=0, frequency_penalty=2.0, max_tokens=6),
        "logprobs": SamplingParams(temperature=0, logprobs=5, max_tokens=6),
    }


def test_after_any_finish_going_on_equals_a_fresh_prefill(loaded: LoadedModel, prompt: list[int]) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12)
    answer = run(loaded, prompt, greedy, NoneDrafter()).tokens[len(prompt) :]

    def block_of_eight(sequence: Sequence, budget: int) -> Draft:
        return Draft.chain([*answer[sequence.num_new :][:8]])

    drafter = PlantedDrafter(PlantedDrafter.Config(script=block_of_eight))
    for name, params in finishing_params(answer, loaded).items():
        plain, drafted = run(loaded, prompt, params, NoneDrafter()), run(loaded, prompt, params, drafter)
        assert drafted.tokens == plain.tokens, name
        assert (drafted.finish_reason, drafted.stop_reason) == (plain.finish_reason, plain.stop_reason), name
        fresh = Sequence("1", list(drafted.tokens), len(prompt), params, 9, loaded.model.new_cache())
        prefill(loaded.model, NoneDrafter(), fresh, chunk=7)
        np.testing.assert_array_equal(
            next_logits(loaded, drafted).view(np.uint32), next_logits(loaded, fresh).view(np.uint32), err_msg=name
        )


def test_the_end_of_the_context(loaded: LoadedModel, model_path: Path, prompt: list[int]) -> None:
    short = load_model(str(model_path), ModelOptions(max_model_len=len(prompt) + 7))
    plain = LLM.from_loaded(loaded).generate(prompt, SamplingParams(temperature=0, max_tokens=20))[0]
    answer = plain.outputs[0].token_ids
    drafter = PlantedDrafter(PlantedDrafter.Config(script=lambda s, b: Draft.chain(answer[s.num_new :][:16])))
    output = LLM.from_loaded(short, drafter=drafter).generate(prompt, SamplingParams(temperature=0, max_tokens=None))[0]
    assert output.outputs[0].token_ids == answer[:7]
    assert output.outputs[0].finish_reason == "length"


def test_best_ids_are_those_of_the_logits(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind each place of a text, and in trees of random tokens; few outputs of the head need both terms."""
    inputs, whole = [], NativeOps.best_ids

    def record(ops: NativeOps, x: np.ndarray, *rest: Any) -> np.ndarray:
        inputs.append((x, *rest))
        return whole(ops, x, *rest)

    monkeypatch.setattr(NativeOps, "best_ids", record)
    model, rng = loaded.model, np.random.default_rng(0)
    ids = loaded.tokenizer.encode(Path(__file__).read_text(encoding="utf-8"))[:384]
    cache = model.new_cache()
    model.forward([Span(cache, ids[:64], range(-1, 63))])
    cache.keep(range(64))
    spans = [Span(model.new_cache(), ids, range(-1, 383), range(384))]
    for size in (1, 2, 5, 8, 17, 40):
        parents = [int(rng.integers(-1, i)) for i in range(size)]
        spans.append(Span(cache, rng.integers(0, model.info.vocab_size, size).tolist(), parents, range(size)))
    for span in spans:
        output = model.forward([span])[0]
        assert output.argmax() == [int(output.row(i).argmax()) for i in range(len(span.tokens))]
    count = import_module("sakiyomi._native").best_ids
    counts = [count(x, head, norm, eps, np.empty(len(x), np.int64), 1) for x, norm, eps, head in inputs]
    assert len(counts) == len(spans)
    assert sum(counts) < 0.03 * sum(len(span.tokens) for span in spans) * model.info.vocab_size / 64
