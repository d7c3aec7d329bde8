"""The index against a search that is obviously right."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sakiyomi.drafters.ngram import NgramDrafter, NgramIndex
from sakiyomi.errors import ParameterError
from sakiyomi.models.toy import TokenCache
from sakiyomi.params import SamplingParams
from sakiyomi.types import Sequence


def search(tokens: Seq[int], config: NgramDrafter.Config, num_tokens: int) -> list[int]:
    for n in range(config.max_ngram, config.min_ngram - 1, -1):
        ends = [end for end in range(n, len(tokens)) if tokens[end - n : end] == tokens[len(tokens) - n :]]
        if ends and len(tokens) >= n:
            end = ends[0] if config.occurrence == "earliest" else ends[-1]
            return list(tokens[end : end + num_tokens])
    return []


configs = st.tuples(st.integers(1, 4), st.integers(0, 3), st.sampled_from(["latest", "earliest"])).map(
    lambda c: NgramDrafter.Config(min_ngram=c[0], max_ngram=c[0] + c[1], occurrence=c[2])
)
texts = st.integers(2, 5).flatmap(lambda size: st.lists(st.integers(0, size - 1), max_size=60))


@given(texts, configs, st.integers(1, 6), st.integers(1, 5))
def test_lookup_equals_a_search(tokens: list[int], config: NgramDrafter.Config, num_tokens: int, chunk: int) -> None:
    index = NgramIndex(config)
    for end in range(0, len(tokens) + 1, chunk):
        index.extend(tokens[:end])
        assert index.lookup(tokens[:end], num_tokens)[0] == search(tokens[:end], config, num_tokens)


def sequence_of(tokens: list[int]) -> Sequence:
    return Sequence("0", tokens, len(tokens), SamplingParams(), 0, TokenCache())


def test_it_drafts_what_followed() -> None:
    drafter = NgramDrafter(NgramDrafter.Config(num_speculative_tokens=3))
    copying, fresh = sequence_of([1, 2, 3, 4, 5, 9, 1, 2]), sequence_of([1, 2, 3])
    drafts = drafter.propose([copying, fresh, copying], [8, 8, 0])
    assert [draft.tokens for draft in drafts] == [(3, 4, 5), (), ()]
    assert drafter.propose([copying], [2])[0].tokens == (3, 4)


def test_a_replaced_tail_is_forgotten() -> None:
    drafter = NgramDrafter()
    sequence = sequence_of([1, 2, 3, 1, 2])
    assert drafter.propose([sequence], [1])[0].tokens == (3,)
    sequence.tokens = [1, 2, 7, 1, 2]
    drafter.rewind(sequence, 2)
    assert drafter.propose([sequence], [1])[0].tokens == (7,)


@pytest.mark.parametrize(
    "options",
    [{"num_speculative_tokens": 0}, {"min_ngram": 0}, {"min_ngram": 4, "max_ngram": 3}, {"occurrence": "last"}],
)
def test_impossible_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ParameterError, match="give"):
        NgramDrafter.Config(**options)  # type: ignore[arg-type]
