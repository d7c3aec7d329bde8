"""Outputs that make logits only when somebody asks for them."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sakiyomi._native", reason="the native kernels are not built")

from sakiyomi.assemble import ModelOptions, load_model
from sakiyomi.decode import prefill, step
from sakiyomi.drafters.none import NoneDrafter
from sakiyomi.errors import SakiyomiError
from sakiyomi.models.native import NativeModel
from sakiyomi.ops.native import NativeOps
from sakiyomi.params import SamplingParams
from sakiyomi.sampling.choose import bare_choice
from sakiyomi.types import THE_BEST, BareChoice, History, Sequence, Span
from sakiyomi.verify.match import MatchVerifier

GREEDY = History([1, 2], 1, SamplingParams(temperature=0.0), seed=0)


@pytest.fixture(scope="module")
def model(write_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> NativeModel:
    folder = write_llama(tmp_path_factory.mktemp("model"), vocab_size=257)
    loaded = load_model(str(folder), ModelOptions(threads=2)).model
    assert isinstance(loaded, NativeModel)
    return loaded


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was computed over the head, in order."""
    calls: list[str] = []

    def watch(name: str, whole: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: calls.append(name) or whole(*args)  # type: ignore[func-returns-value]

    for name in ("best_ids", "normed_logits"):
        monkeypatch.setattr(NativeOps, name, watch(name, getattr(NativeOps, name)))
    return calls


def run_two(model: NativeModel, seed: int = 0, choices: Seq[BareChoice | None] = (None, None)) -> list[Any]:
    """A chain with two asked rows and a tree with four, in one pass."""
    first, second = np.random.default_rng(seed).integers(0, 257, (2, 4)).tolist()
    return model.forward(
        [
            Span(model.new_cache(), first, range(-1, 3), (1, 3), choice=choices[0]),
            Span(model.new_cache(), second, (-1, 0, 0, 1), range(4), choice=choices[1]),
            Span(model.new_cache(), second, range(-1, 3)),
        ]
    )


def test_greedy_tokens_are_those_of_the_logits(model: NativeModel) -> None:
    for seed in range(20):
        chain, tree, none = run_two(model, seed)
        run_two(model, seed + 1)  # states are the pass's own
        chosen = [[output.choose(i, GREEDY) for i in range(n)] for output, n in ((chain, 2), (tree, 4))]
        best = [output.argmax() for output in (chain, tree, none)]
        rows = [[int(output.row(i).argmax()) for i in range(n)] for output, n in ((chain, 2), (tree, 4))]
        assert [*chosen, []] == best == [*rows, []]
        assert best == [output.argmax() for output in (chain, tree, none)]  # from the logits, now that they are there


def test_the_head_runs_once_and_only_when_it_is_needed(model: NativeModel, heads: list[str]) -> None:
    chain, tree, _ = run_two(model)
    assert heads == []
    for output in (tree, chain):
        output.choose(1, GREEDY)
        output.argmax()
    assert heads == ["best_ids"]
    sampled = replace(GREEDY, params=SamplingParams(temperature=1.0))
    for output in (chain, tree):
        assert output.choose(0, sampled) >= 0
        assert output.row(-1).tobytes() == output.row(1 if output is chain else 3).tobytes()
    assert heads == ["best_ids", "normed_logits"]
    with pytest.raises(IndexError):
        chain.row(2)


def test_best_ids_that_are_wanted_come_with_the_pass(model: NativeModel, heads: list[str]) -> None:
    for seed in range(20):
        chain, tree, _ = run_two(model, seed, (THE_BEST, THE_BEST))
        best = chain.argmax() + tree.argmax()
        assert [chain.choose(i, GREEDY) for i in range(2)] + [tree.choose(i, GREEDY) for i in range(4)] == best
        assert heads == []
        lazy = run_two(model, seed, (THE_BEST, None))
        assert heads == []
        assert lazy[0].argmax() + lazy[1].argmax() == best
        assert heads == ["best_ids"]
        assert [int(output.row(i).argmax()) for output, n in ((chain, 2), (tree, 4)) for i in range(n)] == best
        assert all(
            np.array_equal(one.row(i), other.row(i))
            for one, other in zip((chain, tree), lazy, strict=False)
            for i in (0, 1)
        )
        heads.clear()


def draw(output: Any, positions: Seq[int], choice: BareChoice) -> list[int]:
    """What rows choose, whose tokens come at these positions."""
    params = SamplingParams(temperature=choice.temperature)
    histories = [replace(GREEDY, tokens=[1] * position, params=params, seed=choice.seed) for position in positions]
    return [output.choose(i, history) for i, history in enumerate(histories)]


CHAIN, TREE = (2, 4), (1, 2, 2, 3)
"""Where the tokens come that the rows of `run_two` choose."""


@pytest.mark.parametrize("others", [THE_BEST, BareChoice(9, 1.0), BareChoice(3, 0.4)])
def test_drawn_ids_that_are_wanted_come_with_the_pass(model: NativeModel, heads: list[str], others: BareChoice) -> None:
    """They are those of the logits; what was announced otherwise, or for another seed or place, is drawn from these."""
    for seed in range(20):
        mine = BareChoice(seed, 0.8)
        plain = run_two(model, seed)
        wanted = [draw(plain[0], CHAIN, mine), draw(plain[1], TREE, others)]
        heads.clear()
        chain, tree, _ = run_two(model, seed, (mine, others))
        assert [draw(chain, CHAIN, mine), draw(tree, TREE, others)] == wanted
        assert heads == []
        for choice in (BareChoice(seed + 1, 0.8), BareChoice(seed, 0.7)):
            chain, _, _ = run_two(model, seed, (mine, others))
            assert draw(chain, CHAIN, choice) == draw(plain[0], CHAIN, choice)
            assert draw(chain, (7, 8), mine) == draw(plain[0], (7, 8), mine)
            assert heads == ["normed_logits"]
            heads.clear()
        chain, _, _ = run_two(model, seed, (mine, others))
        assert chain.argmax() == plain[0].argmax()
        assert heads == ["best_ids"]


@pytest.mark.parametrize("options", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"logprobs": 2}, {"min_tokens": 3}])
def test_only_bare_choices_are_announced(options: dict[str, Any]) -> None:
    sampled = replace(GREEDY, params=SamplingParams(temperature=0.7), seed=5)
    assert bare_choice(sampled) == BareChoice(5, 0.7)
    assert bare_choice(GREEDY) == THE_BEST
    assert bare_choice(replace(sampled, params=SamplingParams(temperature=0.7, **options))) is None


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": {200: 100.0}},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 2.0},
        {"frequency_penalty": -2.0},
        {"min_tokens": 9},
        {"logprobs": 0},
    ],
)
def test_what_needs_logits_gets_them(model: NativeModel, heads: list[str], options: dict[str, Any]) -> None:
    history = replace(GREEDY, params=SamplingParams(temperature=0.0, **options), end_ids=frozenset(range(0, 257, 2)))
    chain, tree, _ = run_two(model)
    tokens = [chain.choose(1, history), tree.choose(2, history)]
    assert heads == ["normed_logits"]
    if "logit_bias" in options:
        assert tokens == [200, 200]
    if "min_tokens" in options:
        assert all(token % 2 for token in tokens)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_damaged_logits_are_the_same_error(model: NativeModel, monkeypatch: pytest.MonkeyPatch, bad: float) -> None:
    norm = model.decoder.norm.copy()
    norm[3] = bad
    monkeypatch.setattr(model.decoder, "norm", norm)
    chain, tree, _ = run_two(model)
    rows = np.stack([chain.row(0), chain.row(1), *(tree.row(i) for i in range(4))])
    chain, tree, _ = run_two(model)
    assert chain.argmax() + tree.argmax() == model.decoder.ops.argmax(rows).tolist()
    chain, tree, _ = run_two(model, 0, (THE_BEST, THE_BEST))
    assert chain.argmax() + tree.argmax() == model.decoder.ops.argmax(rows).tolist()
    chain, _, _ = run_two(model, 0, (THE_BEST, THE_BEST))
    if np.isnan(rows[0]).any():  # rounding to 8 bits may lose a nan, but spreads an infinite number
        with pytest.raises(SakiyomiError, match="position 2 hold nan"):
            chain.choose(0, GREEDY)
    assert np.isnan(rows).any() or bad is np.nan


@pytest.mark.parametrize("max_tokens", [100, None])
def test_a_cache_gets_its_room_with_the_prompt(model: NativeModel, max_tokens: int | None) -> None:
    """Growing copies all that is there: not in the midst of an answer of usual length, and not for every chunk."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    cache, drafter = model.new_cache(), NoneDrafter()
    sequence = Sequence(id="0", tokens=[1, 2, 3] * 30, num_prompt=90, params=params, seed=0, cache=cache)
    prefill(model, drafter, sequence, 16)
    before = cache.capacity
    assert 90 + 100 <= before <= 90 + 256 + 64
    for _ in range(100):
        step(model, drafter, MatchVerifier(), [sequence], [0])
    assert cache.capacity == before
    assert len(sequence.tokens) == 190
