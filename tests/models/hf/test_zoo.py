"""Models of many kinds: no drafter changes a token, and a rejected draft leaves no trace in any state."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tiny_models import MODELS, REFUSED, VOCAB_SIZE, build, foreign, loaded, model_of, same_or_near  # noqa: E402

from sakiyomi import LLM, SamplingParams  # noqa: E402
from sakiyomi.drafters.planted import PlantedDrafter, scatter  # noqa: E402
from sakiyomi.errors import ParameterError, UnsupportedModelError  # noqa: E402
from sakiyomi.models.hf import HFModel, trees  # noqa: E402
from sakiyomi.models.hf.chains import ChainRunner  # noqa: E402
from sakiyomi.types import Cache, Drafter, Span  # noqa: E402

NAMES = sorted(MODELS)
PROMPTS = [[5, 9, 5, 9, 17, 5, 9, 17, 5, 9], [7]]
NUM_TOKENS = 14


def answer(name: str, drafter: str | Drafter, params: SamplingParams) -> list[list[int]]:
    results = LLM.from_loaded(loaded(name), drafter=drafter).generate(PROMPTS, params, use_tqdm=False)
    return [result.outputs[0].token_ids for result in results]


def manner_of(model: HFModel) -> str:
    runner = model._runner
    if not isinstance(runner, ChainRunner):
        return "trees"
    return "chains" if runner._manner.crops else "states" if runner._manner.chunks else "steps"


@pytest.mark.parametrize("name", NAMES)
def test_the_probe_finds_the_manner(name: str) -> None:
    model = model_of(name)
    assert manner_of(model) == MODELS[name].manner
    shapes = {"trees": "trees", "chains": "chains", "states": "chains", "steps": "none"}
    assert model.info.draft_shape == shapes[MODELS[name].manner]
    assert (model.info.vocab_size, model.info.num_layers, model.info.hidden_size) == (VOCAB_SIZE, 2, 32)


@pytest.mark.parametrize("name", NAMES)
def test_plain_decoding_is_that_of_generate(name: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for prompt, ids in zip(PROMPTS, answer(name, "none", params), strict=True):
        theirs = foreign(name).generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
        )
        assert same_or_near(model_of(name), prompt, params, ids, theirs[0, len(prompt) :].tolist())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", NAMES)
def test_no_drafter_changes_a_token(name: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    if MODELS[name].manner == "steps":  # it would be right, too, if it were worth while
        info = replace(model_of(name).info, draft_shape="chains")
        monkeypatch.setattr(model_of(name), "info", info)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True)
    plain = answer(name, "none", params)
    known = {tuple(prompt): ids for prompt, ids in zip(PROMPTS, plain, strict=True)}
    planted = PlantedDrafter(PlantedDrafter.Config(script=scatter(known, 6, VOCAB_SIZE)))
    for drafter in ("ngram:min_ngram=1", "suffix", planted):
        for prompt, ours, theirs in zip(PROMPTS, plain, answer(name, drafter, params), strict=True):
            assert same_or_near(model_of(name), prompt, params, ours, theirs), drafter


def random_parents(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(-1, row) if row else -1 for row in range(count)]


def random_path(rng: random.Random, parents: Sequence[int]) -> list[int]:
    path, row = [], -1
    while children := [child for child, parent in enumerate(parents) if parent == row]:
        if rng.random() < 0.3:
            break
        row = rng.choice(children)
        path.append(row)
    return path


def feed(model: HFModel, cache: Cache, tokens: Sequence[int]) -> np.ndarray:
    (output,) = model.forward([Span(cache, tokens, range(-1, len(tokens) - 1), range(len(tokens)))])
    cache.keep(range(len(tokens)))
    return np.stack([output.row(row) for row in range(len(tokens))])


@pytest.mark.parametrize("name", NAMES)
def test_after_any_rejection_the_state_is_that_of_the_accepted_tokens(name: str) -> None:
    model, rng = model_of(name), random.Random(name)
    cache, tokens = model.new_cache(), [rng.randrange(2, VOCAB_SIZE) for _ in range(3)]
    feed(model, cache, tokens)
    for turn in range(8):
        parents = random_parents(rng, rng.randint(1, 7))
        drafted = [rng.randrange(2, VOCAB_SIZE) for _ in parents]
        (output,) = model.forward([Span(cache, drafted, parents, range(len(parents)))])
        path = random_path(rng, parents)
        if path:
            probe = cache.fork()
            fresh = feed(model, probe, [drafted[row] for row in path])
            assert fresh == pytest.approx(np.stack([output.row(row) for row in path]), abs=2e-3)
        cache.keep(path)
        tokens += [drafted[row] for row in path]
        assert cache.length == len(tokens)
        if turn % 4 == 3:
            kept = rng.randint(1, len(tokens))
            cache.truncate(kept)
            del tokens[kept:]
    rest = [3, 4, 5]
    rows = feed(model, twin := cache.fork(), rest)
    expected = feed(model, model.new_cache(), [*tokens, *rest])[-3:]
    assert rows == pytest.approx(expected, abs=2e-3)
    assert cache.length == len(tokens)
    assert twin.num_bytes > 0


@pytest.mark.parametrize("max_columns", [4096, 30])
@pytest.mark.parametrize("name", ["gpt2", "gemma3", "mixtral", "llama4", "rwkv"])
def test_a_batch_is_its_sequences(name: str, max_columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "MAX_COLUMNS", max_columns)
    model, rng = model_of(name), random.Random(name)
    spans = []
    for length in (2, 21, 12):
        caches = [model.new_cache(), model.new_cache()]
        tokens = [rng.randrange(2, VOCAB_SIZE) for _ in range(length)]
        for cache in caches:
            feed(model, cache, tokens)
        parents = random_parents(rng, 5)
        drafted = [rng.randrange(2, VOCAB_SIZE) for _ in parents]
        spans.append([Span(cache, drafted, parents, [0, 2, 4], taps=(1, 2)) for cache in caches])
    together = model.forward([pair[0] for pair in spans])
    for output, (_, alone) in zip(together, spans, strict=True):
        (expected,) = model.forward([alone])
        assert output.argmax() == expected.argmax()
        assert [output.row(i) for i in range(3)] == [pytest.approx(expected.row(i), abs=1e-3) for i in range(3)]
        assert output.taps == pytest.approx(expected.taps, abs=1e-3)


NORMS = [("gpt2", "transformer.ln_f"), ("gemma3", "model.norm"), ("falcon", "transformer.ln_f")]


def count_hooks(model: Any) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize(("name", "norm"), NORMS)
def test_taps_are_the_hidden_states(name: str, norm: str) -> None:
    model, other = model_of(name), foreign(name)
    tokens = list(range(2, 16))
    hooks = count_hooks(other)
    (output,) = model.forward([Span(model.new_cache(), tokens, range(-1, 13), taps=(0, 1, 2))])
    assert count_hooks(other) == hooks
    with torch.no_grad():
        states = other(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        first, second, last = output.taps.split(32, dim=1)
        assert torch.allclose(first, states[0][0], atol=1e-4)
        assert torch.allclose(second, states[1][0], atol=1e-4)
        assert torch.allclose(other.get_submodule(norm)(last), states[2][0], atol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "gemma3", "mamba"])
def test_a_shallow_model_is_the_first_layers(name: str) -> None:
    model = model_of(name)
    tokens = list(range(2, 14))
    whole = feed(model, model.new_cache(), tokens)
    assert feed(model.shallow(2), model.shallow(2).new_cache(), tokens) == pytest.approx(whole, abs=1e-4)
    cut = model.shallow(1)
    assert cut.info.num_layers == 1
    (one,) = model.forward([Span(model.new_cache(), tokens, range(-1, 11), taps=(1,))])
    (same,) = cut.forward([Span(cut.new_cache(), tokens, range(-1, 11), taps=(1,))])
    assert torch.allclose(one.taps, same.taps, atol=1e-4)
    assert foreign(name).config.num_hidden_layers == 2
    with pytest.raises(ParameterError, match="layers 1 to 2"):
        model.shallow(3)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_put_back_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=REFUSED[name].manner):
        HFModel(build(REFUSED[name]))


class Summing(torch.nn.Module):
    """A model that sums embeddings; told to cheat, it keeps the sum for itself."""

    def __init__(self, cheats: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = transformers.RwkvConfig(
            vocab_size=VOCAB_SIZE, hidden_size=8, num_hidden_layers=1, context_length=64
        )
        self.table, self.head = torch.nn.Embedding(VOCAB_SIZE, 8), torch.nn.Linear(8, VOCAB_SIZE)
        self.cheats = cheats
        self.total = torch.zeros(1, 1, 8)

    def forward(self, input_ids: Any, state: Any = None, use_cache: bool = True, return_dict: bool = True) -> Any:
        start = torch.zeros(1, 1, 8) if state is None else self.total if self.cheats else state[0]
        sums = start + self.table(input_ids).cumsum(1)
        self.total = sums[:, -1:]
        return SimpleNamespace(logits=self.head(sums), state=[torch.zeros(1) if self.cheats else self.total])


def test_a_state_outside_of_what_forward_returns_is_noticed() -> None:
    honest = HFModel(Summing(cheats=False).eval(), end_token_ids=())
    assert manner_of(honest) == "states"
    with pytest.raises(UnsupportedModelError, match="cannot be put back"):
        HFModel(Summing(cheats=True).eval(), end_token_ids=())


def test_a_model_in_training_is_refused() -> None:
    model = build(MODELS["gpt2"]).train()
    with pytest.raises(ParameterError, match=r"eval\(\)"):
        HFModel(model)


@pytest.mark.parametrize("name", ["gpt2", "falcon_alibi", "mamba"])
def test_misuse_is_refused_and_changes_nothing(name: str) -> None:
    model = model_of(name)
    cache = model.new_cache()
    feed(model, cache, [5, 6, 7])
    with pytest.raises(ParameterError, match="share a cache"):
        model.forward([Span(cache, [1], [-1]), Span(cache, [1], [-1])])
    with pytest.raises(ParameterError, match="another model"):
        model.forward([Span(model_of("rwkv" if name == "gpt2" else "gpt2").new_cache(), [1], [-1])])
    model.forward([Span(cache, [8, 9, 10], [-1, 0, 0], [0])])
    for path in ([3], [1, 0], [0, 0], [-1]):
        with pytest.raises(ParameterError, match="ascend"):
            cache.keep(path)
    with pytest.raises(ParameterError, match="truncate"):
        cache.truncate(4)
    cache.keep([0, 2])
    assert feed(model, cache, [11]) == pytest.approx(
        feed(model, model.new_cache(), [5, 6, 7, 8, 10, 11])[-1:], abs=1e-3
    )
