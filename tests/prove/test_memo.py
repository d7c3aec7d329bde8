"""A remembered row is the row, whatever was cached and in whatever tree it stands."""

from __future__ import annotations

import numpy as np
import pytest

from sakiyomi.models.toy import TokenCache, ToyModel, random_law
from sakiyomi.params import SamplingParams
from sakiyomi.prove import memo as memo_module
from sakiyomi.prove.memo import MemoModel, remember
from sakiyomi.sampling.distributions import law_at, law_of
from sakiyomi.types import History, Span


def test_rows_are_the_models_and_are_computed_once() -> None:
    model = ToyModel(random_law(9, 1, order=30), 9)
    memo = MemoModel(model)
    prompt = [1, 2, 3, 4] * 5
    passes: list[int] = []
    for _ in range(2):
        cache, own = memo.new_cache(), model.new_cache()
        for tokens in (prompt, [5, 6]):
            span = Span(own, tokens, range(-1, len(tokens) - 1))
            model.forward([span])
            memo.forward([Span(cache, tokens, span.parents)])
            own.keep(range(len(tokens)))
            cache.keep(range(len(tokens)))
        tree = ([7, 1, 2, 3], [-1, 0, 0, 2], [0, 1, 3])
        expected, got = model.forward([Span(own, *tree)])[0], memo.forward([Span(cache, *tree)])[0]
        assert all(np.array_equal(expected.row(i), got.row(i)) for i in range(3))
        assert expected.argmax() == got.argmax()
        passes.append(memo.num_passes)
    assert passes[0] == passes[1]


def test_only_rows_that_are_looked_at_are_computed() -> None:
    memo = MemoModel(ToyModel(random_law(9, 1), 9))
    output = memo.forward([Span(TokenCache([1, 2]), [3, 4], [-1, 0], [0, 1])])[0]
    assert memo.num_passes == 0
    output.row(1)
    assert memo.num_passes == 2  # what is cached, and the row


def test_taps_and_forgotten_rows() -> None:
    model = ToyModel(random_law(9, 1), 9)
    memo = MemoModel(model, max_bytes=1)
    span = Span(TokenCache([1, 2]), [3, 4], [-1, 0], [0, 1], (0, 2))
    output = memo.forward([span])[0]
    assert np.array_equal(output.taps, model.forward([span])[0].taps)
    first = output.row(0).copy()
    output.row(1)
    assert np.array_equal(output.row(0), first)


@pytest.mark.parametrize("max_laws", [1, 100])
def test_laws_are_those_of_the_rows(monkeypatch: pytest.MonkeyPatch, max_laws: int) -> None:
    monkeypatch.setattr(memo_module, "MAX_LAWS", max_laws)
    memo = MemoModel(ToyModel(random_law(9, 1), 9))
    output = memo.forward([Span(TokenCache([1, 2]), [3, 4], [-1, 0], [0, 1])])[0]
    settings = [SamplingParams(temperature=t, frequency_penalty=f) for t in (0.5, 1.0) for f in (0.0, 1.0)]
    for _ in range(2):
        for params in settings:
            for i, path in enumerate([(), (4,)]):
                history = History([1, 2, 3], 1, params, 0, path=path)
                law, expected = law_at(output, i, history), law_of(output.row(i), history)
                assert law.probs.tolist() == expected.probs.tolist()
    assert law_at(output, 1, history) is law  # the last one is remembered in either case


def test_a_model_has_one_memory() -> None:
    model = ToyModel(random_law(9, 1), 9)
    wrap = remember({})
    assert wrap(model) is wrap(model) is wrap(wrap(model))
    assert wrap(model).shallow(1) is wrap(model).shallow(1)
