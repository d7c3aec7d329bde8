"""Every lossless rule emits the target's law exactly: all outcomes are enumerated, nothing is sampled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest
from enumeration import (
    EXACT,
    PROMPT,
    WARM,
    ChanceModel,
    ConstantTable,
    Enumerator,
    Table,
    TreeDrafter,
    deviation,
    emitted_law,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from sakiyomi.decode import prefill, step
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.noise import Randomness
from sakiyomi.params import SamplingParams
from sakiyomi.sampling.distributions import TargetLaws
from sakiyomi.types import Drafter, DrafterContext, Sequence, Span, Verifier
from sakiyomi.verify.block import BlockVerifier, joint_ratios
from sakiyomi.verify.match import MatchVerifier
from sakiyomi.verify.rejection import RejectionVerifier
from sakiyomi.verify.traversal import TraversalVerifier
from sakiyomi.verify.tree import TreeVerifier

RULES = {
    "match": lambda randomness: MatchVerifier(),
    "rejection": lambda randomness: RejectionVerifier(randomness=randomness),
    "block": lambda randomness: BlockVerifier(randomness=randomness),
    "tree": lambda randomness: TreeVerifier(randomness=randomness),
    "traversal": lambda randomness: TraversalVerifier(randomness=randomness),
}
TREE_RULES = ("tree", "traversal")
SAMPLED_RULES = ("rejection", "block", *TREE_RULES)
SHAPES = ((2, 2), (3, 1), (1, 2), (2, 1, 1))
FEW = settings(max_examples=3)
seeds = st.integers(0, 10**6)
zeros = st.integers(0, 1)


def draws(table: Table, shape: Seq[int], kind: str) -> Any:
    return lambda randomness: TreeDrafter(table, shape, kind, randomness)


def model_drafter(table: Table, draw: str, depth: int, width: int = 1, max_nodes: int = 24) -> Any:
    def make(randomness: Randomness) -> Drafter:
        config = ModelDrafter.Config(
            model="toy", num_speculative_tokens=depth, width=width, draw=draw, max_nodes=max_nodes
        )
        model = ChanceModel(table, randomness)
        return ModelDrafter(config, DrafterContext(model, lambda name: model), randomness)

    return make


@pytest.mark.parametrize("rule", SAMPLED_RULES)
@pytest.mark.parametrize("depth", [1, 2, 3])
@given(seed=seeds, p_zeros=zeros, q_zeros=zeros)
@FEW
def test_sampled_chains(rule: str, depth: int, seed: int, p_zeros: int, q_zeros: int) -> None:
    size = 4 if depth < 3 else 3
    p, q = Table(size, seed, p_zeros), Table(size, seed + 1, q_zeros)
    drafter = draws(q, (1,) * depth, "independent")
    assert deviation(p, drafter, RULES[rule], num_tokens=depth + 1) <= EXACT


@pytest.mark.parametrize("rule", TREE_RULES)
@pytest.mark.parametrize("kind", ["independent", "without_replacement"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@given(seed=seeds, p_zeros=zeros, q_zeros=zeros)
@settings(max_examples=1)  # many shapes already
def test_sampled_trees(rule: str, kind: str, shape: tuple[int, ...], seed: int, p_zeros: int, q_zeros: int) -> None:
    p, q = Table(3, seed, p_zeros), Table(3, seed + 1, q_zeros)
    assert deviation(p, draws(q, shape, kind), RULES[rule], num_tokens=len(shape) + 1) <= EXACT


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", [(1, 1, 1), *SHAPES], ids=str)
@given(seed=seeds, p_zeros=zeros)
@FEW
def test_deterministic_drafts(rule: str, shape: tuple[int, ...], seed: int, p_zeros: int) -> None:
    p, q = Table(4, seed, p_zeros), Table(4, seed + 1)
    assert deviation(p, draws(q, shape, "fixed"), RULES[rule], num_tokens=len(shape) + 1) <= EXACT


@pytest.mark.parametrize("rule", SAMPLED_RULES)
@given(seed=seeds)
@settings(max_examples=1)
def test_two_steps_of_the_drafting_model(rule: str, seed: int) -> None:
    p, q = Table(3, seed), Table(3, seed + 1)
    drafter = model_drafter(q, "independent", 2)
    assert deviation(p, drafter, RULES[rule], num_tokens=3, num_steps=2) <= EXACT


@pytest.mark.parametrize("rule", TREE_RULES)
@given(seed=seeds)
@settings(max_examples=1)
def test_two_steps_of_trees_that_grow_where_the_drafter_is_confident(rule: str, seed: int) -> None:
    p, q = Table(3, seed), Table(3, seed + 1)
    drafter = model_drafter(q, "independent", 2, width=2, max_nodes=3)
    assert deviation(p, drafter, RULES[rule], num_tokens=3, num_steps=2) <= EXACT


@pytest.mark.parametrize("rule", TREE_RULES)
@given(seed=seeds)
@settings(max_examples=1)
def test_a_deep_tree_that_grows_where_the_drafter_is_confident(rule: str, seed: int) -> None:
    p, q = Table(3, seed), Table(3, seed + 1)
    drafter = model_drafter(q, "independent", 3, width=2, max_nodes=5)
    assert deviation(p, drafter, RULES[rule], num_tokens=4) <= EXACT


@pytest.mark.parametrize("width", [1, 2])
@given(seed=seeds)
@FEW
def test_match_with_drafts_of_its_own_noise(width: int, seed: int) -> None:
    p, q = Table(3, seed), Table(3, seed + 1)
    for draw in ("coupled", "argmax"):
        drafter = model_drafter(q, draw, 2, width)
        # The order of a coupled tree's siblings comes from real noise; they are drafts like any other.
        assert deviation(p, drafter, RULES["match"], num_tokens=3, num_steps=2) <= EXACT


PARAMS = {
    "cold": SamplingParams(temperature=0.6, max_tokens=None),
    "top_k": SamplingParams(temperature=1, top_k=2, max_tokens=None),
    "top_p": SamplingParams(temperature=1.3, top_p=0.8, max_tokens=None),
    "min_p": SamplingParams(temperature=1, min_p=0.3, max_tokens=None),
    "penalties": SamplingParams(
        temperature=1, frequency_penalty=0.9, presence_penalty=-0.5, repetition_penalty=1.4, max_tokens=None
    ),
    "bias": SamplingParams(temperature=1, logit_bias={1: 1.5, 2: -100}, max_tokens=None),
    "greedy": SamplingParams(temperature=0, max_tokens=None),
}


@pytest.mark.parametrize("rule", SAMPLED_RULES)
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
@given(seed=seeds)
@settings(max_examples=2)
def test_under_every_parameter(rule: str, params: SamplingParams, seed: int) -> None:
    p, q = Table(4, seed), Table(4, seed + 1)
    width = 2 if rule in TREE_RULES else 1
    drafter = model_drafter(q, "independent", 2, width, max_nodes=3)
    assert deviation(p, drafter, RULES[rule], num_tokens=3, params=params) <= EXACT


@pytest.mark.parametrize("rule", SAMPLED_RULES)
@given(seed=seeds)
@settings(max_examples=2)
def test_drafts_that_stop_by_what_they_drew(rule: str, seed: int) -> None:
    """A token that makes the drafter stop is kept: then the length may depend on it."""
    p, q = Table(3, seed), Table(3, seed + 1)

    def new_sequence(*args: Any) -> Sequence:
        sequence = Sequence(*args)
        sequence.end_ids = frozenset({2})
        return sequence

    drafter = model_drafter(q, "independent", 3)
    assert deviation(p, drafter, RULES[rule], num_tokens=4, new_sequence=new_sequence) <= EXACT


# ---------------------------------------------------------------------------------------------- relations


def num_emitted(table: Table, drafter: Any, rule: str) -> float:
    """Expected tokens of one step."""
    enumerator = Enumerator()

    def run() -> int:
        model = ChanceModel(table, enumerator)
        built: Drafter = drafter(enumerator)
        verifier: Verifier = RULES[rule](enumerator)
        sequence = Sequence("0", list(PROMPT), len(PROMPT), WARM, 5, model.new_cache())
        prefill(model, built, sequence)
        step(model, built, verifier, [sequence], [64])
        return sequence.num_new

    return sum(probability * count for probability, count in enumerator.outcomes(run))


def test_the_worked_example_of_block_verification() -> None:
    """i.i.d. rows (1/3, 2/3) against drafts from (2/3, 1/3), two tokens deep."""
    p, q = ConstantTable([1 / 3, 2 / 3]), ConstantTable([2 / 3, 1 / 3])
    drafter = draws(q, (1, 1), "independent")
    assert num_emitted(p, drafter, "rejection") - 1 == pytest.approx(10 / 9, abs=1e-6)
    assert num_emitted(p, drafter, "block") - 1 == pytest.approx(11 / 9, abs=1e-6)


@pytest.mark.parametrize(
    ("low", "high", "shape"),
    [
        ("rejection", "block", (1, 1, 1)),
        ("tree", "traversal", (2, 1)),
        ("tree", "traversal", (1, 2)),
        ("tree", "traversal", (1, 1, 1)),
    ],
    ids=str,
)
@given(seed=seeds)
@FEW
def test_joint_rules_accept_at_least_as_much(low: str, high: str, shape: tuple[int, ...], seed: int) -> None:
    p, q = Table(3, seed), Table(3, seed + 1)
    drafter = draws(q, shape, "independent" if len(set(shape)) == 1 and shape[0] == 1 else "without_replacement")
    assert num_emitted(p, drafter, high) >= num_emitted(p, drafter, low) - 1e-12


@given(seed=seeds)
@FEW
def test_forged_laws(seed: int) -> None:
    p = Table(3, seed)
    for rule in SAMPLED_RULES:
        assert num_emitted(p, draws(p, (1, 1, 1), "independent"), rule) == pytest.approx(4, abs=1e-12)
    apart_p, apart_q = ConstantTable([0.5, 0.5, 1e-30]), ConstantTable([1e-30, 1e-30, 1.0])
    for rule in SAMPLED_RULES:
        assert num_emitted(apart_p, draws(apart_q, (1, 1), "independent"), rule) == pytest.approx(1, abs=1e-12)


@given(seed=seeds)
@FEW
def test_one_rule_in_two_guises(seed: int) -> None:
    """tree is rejection on a chain, traversal is block on a chain; for one drafted token all are the same."""
    p, q = Table(3, seed), Table(3, seed + 1)
    for depth in (1, 2, 3):
        drafter = draws(q, (1,) * depth, "independent")
        tokens = {rule: num_emitted(p, drafter, rule) for rule in SAMPLED_RULES}
        assert tokens["tree"] == pytest.approx(tokens["rejection"], abs=1e-12)
        assert tokens["traversal"] == pytest.approx(tokens["block"], abs=1e-12)
        if depth == 1:
            assert tokens["block"] == pytest.approx(tokens["rejection"], abs=1e-12)


@given(seed=seeds)
@FEW
def test_the_lemma_of_block_verification(seed: int) -> None:
    """At least i tokens of a drawn x are kept with probability P_i, for every x."""
    p, q = Table(3, seed), Table(3, seed + 1)
    enumerator = Enumerator()

    def run() -> tuple[tuple[int, ...], list[float], int]:
        model = ChanceModel(p, enumerator)
        sequence = Sequence("0", list(PROMPT), len(PROMPT), WARM, 5, model.new_cache())
        drafter = TreeDrafter(q, (1, 1), "independent", enumerator)
        prefill(model, drafter, sequence)
        draft = drafter.draw(sequence)
        output = model.forward([Span(sequence.cache, [PROMPT[-1], *draft.tokens], [-1, 0, 1], [0, 1, 2])])[0]
        ratios = joint_ratios(draft, TargetLaws(draft, output, sequence))
        verdict = BlockVerifier(randomness=enumerator).verify(draft, output, sequence)
        return draft.tokens, [*ratios, 0.0, 0.0][:3], len(verdict.path)

    drawn: dict[tuple[int, ...], float] = defaultdict(float)
    kept: dict[tuple[int, ...], Any] = defaultdict(lambda: np.zeros(3))
    expected = {}
    for probability, (tokens, ratios, length) in enumerator.outcomes(run):
        drawn[tokens] += probability
        kept[tokens][: length + 1] += probability
        expected[tokens] = ratios
    for tokens, ratios in expected.items():
        # The coin of a prefix is independent of what was drawn behind it, so only the whole chain shows the lemma.
        assert kept[tokens][2] / drawn[tokens] == pytest.approx(ratios[2], abs=1e-12)
    for first in {tokens[0] for tokens in drawn}:
        chains = [tokens for tokens in drawn if tokens[0] == first]
        share = sum(kept[tokens][1] for tokens in chains) / sum(drawn[tokens] for tokens in chains)
        assert share == pytest.approx(expected[chains[0]][1], abs=1e-12)


def test_the_bench_counts_every_outcome_once() -> None:
    p = Table(3, 1)
    law = emitted_law(p, draws(p, (1,), "fixed"), RULES["match"], 2)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert len(law) == 9
