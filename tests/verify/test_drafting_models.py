"""The law of what is emitted with drafters that lean on the target itself, or on a model with other tokens: exactly."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest
from enumeration import EXACT, WARM, ChanceModel, Table, deviation
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from sakiyomi.drafters.layerskip import LayerskipDrafter
from sakiyomi.drafters.lookahead import LookaheadDrafter
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.noise import Randomness
from sakiyomi.params import SamplingParams
from sakiyomi.text.tokenizer import Tokenizer
from sakiyomi.text.vocabulary import Side, Translation
from sakiyomi.types import Drafter, DrafterContext, TokenizerData, Verifier
from sakiyomi.verify.block import BlockVerifier
from sakiyomi.verify.match import MatchVerifier
from sakiyomi.verify.rejection import RejectionVerifier
from sakiyomi.verify.traversal import TraversalVerifier
from sakiyomi.verify.tree import TreeVerifier

RULES: dict[str, Callable[[Randomness], Verifier]] = {
    "match": lambda randomness: MatchVerifier(),
    "rejection": lambda randomness: RejectionVerifier(randomness=randomness),
    "block": lambda randomness: BlockVerifier(randomness=randomness),
    "tree": lambda randomness: TreeVerifier(randomness=randomness),
    "traversal": lambda randomness: TraversalVerifier(randomness=randomness),
}
FEW = settings(max_examples=2)
seeds = st.integers(0, 10**6)
PARAMS = {
    "warm": WARM,
    "filtered": SamplingParams(temperature=0.8, top_p=0.9, max_tokens=None, ignore_eos=True),
    "penalties": SamplingParams(temperature=1.0, presence_penalty=1.0, max_tokens=None, ignore_eos=True),
}


def make_tokenizer(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    backend = Backend(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer.load(TokenizerData(json=backend.to_str()))


TARGET = Side(tokenizer=make_tokenizer({"a": 0, "b": 1, "ab": 2}, [("a", "b")]), vocab_size=3)
# "c" and "ba" exist nowhere in the target's vocabulary.
DRAFTING = Side(tokenizer=make_tokenizer({"c": 0, "b": 1, "a": 2, "ba": 3}, [("b", "a")]), vocab_size=4)
TRANSLATION = Translation(DRAFTING, TARGET)


def foreign(seed: int, vocabulary: str, draw: str, width: int) -> Any:
    def make(randomness: Randomness) -> Drafter:
        config = ModelDrafter.Config(
            model="toy", num_speculative_tokens=2, width=width, max_nodes=4, draw=draw, vocabulary=vocabulary
        )
        model = ChanceModel(Table(4, seed), randomness)
        context = DrafterContext(model, lambda name: model, translate=lambda name: TRANSLATION)
        return ModelDrafter(config, context, randomness)

    return make


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
@pytest.mark.parametrize(
    ("rule", "vocabulary", "draw", "width"),
    [
        ("match", "tokens", "coupled", 1),
        ("match", "text", "argmax", 1),
        ("rejection", "tokens", "independent", 1),
        ("rejection", "text", "independent", 1),
        ("block", "tokens", "independent", 1),
        ("tree", "tokens", "independent", 2),
        ("traversal", "tokens", "independent", 2),
        ("traversal", "text", "argmax", 2),
    ],
)
@given(seed=seeds)
@FEW
def test_other_vocabularies(
    rule: str, vocabulary: str, draw: str, width: int, params: SamplingParams, seed: int
) -> None:
    drafter = foreign(seed + 1, vocabulary, draw, width)
    table = Table(3, seed)
    assert deviation(table, drafter, RULES[rule], num_tokens=3, num_steps=2, params=params) <= EXACT


class ShallowModel(ChanceModel):
    """A toy whose first layers have another law than all of them."""

    def __init__(self, table: Table, first: Table, randomness: Randomness) -> None:
        super().__init__(table, randomness)
        self.first = ChanceModel(first, randomness)

    def shallow(self, num_layers: int, skip: Collection[int] = ()) -> ChanceModel:
        return self.first


@pytest.mark.parametrize(
    ("rule", "draw", "width"),
    [
        ("match", "coupled", 1),
        ("match", "argmax", 2),
        ("rejection", "independent", 1),
        ("block", "independent", 1),
        ("tree", "independent", 2),
        ("traversal", "independent", 2),
    ],
)
@given(seed=seeds)
@FEW
def test_layerskip(rule: str, draw: str, width: int, seed: int) -> None:
    p, q = Table(3, seed), Table(3, seed + 1)

    def make(randomness: Randomness) -> Drafter:
        model = ShallowModel(p, q, randomness)
        config = LayerskipDrafter.Config(exit_layer=1, num_speculative_tokens=2, width=width, max_nodes=3, draw=draw)
        return LayerskipDrafter(config, DrafterContext(model, lambda name: model), randomness)

    # Two steps of sampled trees have too many outcomes to go through.
    num_steps = 2 if width == 1 else 1
    assert deviation(p, make, RULES[rule], num_tokens=1 + num_steps, num_steps=num_steps) <= EXACT


@pytest.mark.parametrize("rule", ["match", "rejection", "traversal"])
@given(seed=seeds)
@FEW
def test_lookahead(rule: str, seed: int) -> None:
    def make(randomness: Randomness) -> Drafter:
        return LookaheadDrafter(LookaheadDrafter.Config(window=2, ngram=3, guesses=2))

    assert deviation(Table(3, seed), make, RULES[rule], num_tokens=4, num_steps=3) <= EXACT
