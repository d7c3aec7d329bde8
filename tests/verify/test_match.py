"""match: with any drafter, at any temperature, in any company, the text of plain decoding with the same seed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sakiyomi import LLM, SamplingParams
from sakiyomi.assemble import LoadedModel, ModelOptions, load_model
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.drafters.ngram import NgramDrafter
from sakiyomi.drafters.none import NoneDrafter
from sakiyomi.drafters.planted import PlantedDrafter, scatter
from sakiyomi.models.toy import ToyModel, random_law
from sakiyomi.types import Drafter, DrafterContext, Model

VOCAB = 23
PROMPTS = [[1, 2, 3, 4], [5, 6], [7, 8, 9, 7, 8, 9, 7, 8], [10]]
PARAMS = {
    "greedy": {"temperature": 0},
    "cold": {"temperature": 0.5, "top_k": 12},
    "warm": {"temperature": 1},
    "hot": {"temperature": 1.6, "top_p": 0.9, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
}


def toy() -> LoadedModel:
    model = ToyModel(random_law(VOCAB, 1, order=3, scale=2), VOCAB, end_token_ids=(0,))
    return LoadedModel(model=model, tokenizer=None, chat_template=None, path=Path("toy"))


def near(tokens: Any) -> Any:
    """A law like the toy's, but not the same."""
    return random_law(VOCAB, 1, order=3, scale=2)(tokens) + random_law(VOCAB, 2, order=2, scale=0.7)(tokens)


def model_drafter(model: Model, **more: Any) -> ModelDrafter:
    return ModelDrafter(ModelDrafter.Config(model="other", **more), DrafterContext(model, lambda name: model))


DRAFTERS: dict[str, Callable[[Model, dict[tuple[int, ...], list[int]]], Drafter]] = {
    "ngram": lambda model, truth: NgramDrafter(NgramDrafter.Config(min_ngram=1)),
    "scatter": lambda model, truth: PlantedDrafter(PlantedDrafter.Config(script=scatter(truth, 9, VOCAB))),
    "coupled": lambda model, truth: model_drafter(model),
    "coupled tree": lambda model, truth: model_drafter(model, width=3, max_nodes=10),
    "argmax tree": lambda model, truth: model_drafter(model, width=2, draw="argmax"),
    "independent": lambda model, truth: model_drafter(model, draw="independent"),
    "independent tree": lambda model, truth: model_drafter(model, draw="independent", width=2, max_nodes=9),
}


def answer(loaded: LoadedModel, drafter: Drafter, prompts: list[list[int]], batch: int, **params: Any) -> Any:
    llm = LLM.from_loaded(loaded, drafter=drafter, max_num_seqs=batch)
    outputs = llm.generate(prompts, SamplingParams(seed=31, n=3, max_tokens=25, **params), use_tqdm=False)
    accepted = sum(output.speculation.num_accepted_tokens for output in outputs)
    texts = {tuple(o.prompt_token_ids): [one.token_ids for one in o.outputs] for o in outputs}
    return texts, accepted


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_text_is_that_of_plain_decoding(name: str, params: dict[str, Any]) -> None:
    plain, _ = answer(toy(), NoneDrafter(), PROMPTS, 1, **params)
    truth = {prompt: samples[0] for prompt, samples in plain.items()}
    loaded = toy()
    drafter = DRAFTERS[name](ToyModel(near, VOCAB), truth)
    alone, accepted = answer(loaded, drafter, PROMPTS, 1, **params)
    batch, _ = answer(loaded, drafter, PROMPTS[::-1], 4, **params)
    shuffled = [PROMPTS[i] for i in (2, 0, 3, 1)]
    restarted, _ = answer(toy(), DRAFTERS[name](ToyModel(near, VOCAB), truth), shuffled, 4, **params)
    assert alone == plain
    assert batch == plain
    assert restarted == plain
    assert accepted > 0 or name == "ngram"


def test_sharing_the_noise_guesses_right_more_often() -> None:
    accepted = {
        draw: answer(toy(), model_drafter(ToyModel(near, VOCAB), draw=draw), PROMPTS, 4, temperature=1)[1]
        for draw in ("coupled", "argmax", "independent")
    }
    assert accepted["coupled"] > 1.2 * accepted["argmax"]
    assert accepted["coupled"] > 1.2 * accepted["independent"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_real_model_with_trees_of_its_first_layers(model_path: Path, temperature: float) -> None:
    """Two samples of each prompt, four sequences at a time, with neighbours in two orders, and after a restart."""
    loaded = load_model(str(model_path), ModelOptions())
    prompts = [[504 + 7 * i, 1000 + i, 260, 3, 57 * i + 5] for i in range(4)]
    params = SamplingParams(temperature=temperature, top_p=0.95, seed=3, n=2, max_tokens=8)
    plain = LLM.from_loaded(loaded, max_num_seqs=1).generate(prompts, params, use_tqdm=False)
    restarted = load_model(str(model_path), ModelOptions(threads=1))
    for model, order in ((loaded, (3, 2, 1, 0)), (restarted, (2, 0, 3, 1))):
        drafter = model_drafter(model.model.shallow(27), width=3, max_nodes=12)
        llm = LLM.from_loaded(model, drafter=drafter, max_num_seqs=4)
        outputs = llm.generate([prompts[i] for i in order], params, use_tqdm=False)
        for i, output in zip(order, outputs, strict=True):
            assert [one.token_ids for one in output.outputs] == [one.token_ids for one in plain[i].outputs]
        assert sum(output.speculation.num_accepted_tokens for output in outputs) > 0
