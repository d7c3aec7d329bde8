"""Drafting with the target's own first layers: the same tokens and bits, and no layer runs twice over a row."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import pytest

from sakiyomi.decode import Step, prefill, step
from sakiyomi.drafters.layerskip import LayerskipDrafter, parse_layers
from sakiyomi.drafters.none import NoneDrafter
from sakiyomi.errors import ParameterError
from sakiyomi.models.toy import ToyModel, random_law
from sakiyomi.params import SamplingParams
from sakiyomi.sampling.distributions import follow_choices
from sakiyomi.tree import Draft
from sakiyomi.types import Checkpoint, Drafter, DrafterContext, Model, Output, Sequence, Span, Verdict, Verifier
from sakiyomi.verify.match import MatchVerifier

needs_native = pytest.mark.skipif(
    importlib.util.find_spec("sakiyomi._native") is None, reason="the native kernels are not built"
)
NUM_LAYERS, VOCAB = 5, 61
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
WARM = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=24)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    """A tiny Llama whose layers do little, so that its first layers often agree with all."""
    rng = np.random.default_rng(1)
    width, inner, kv = 64, 96, 32
    shapes = {"model.embed_tokens.weight": (VOCAB, width), "model.norm.weight": (width,)}
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (width,),
            f"{prefix}post_attention_layernorm.weight": (width,),
            f"{prefix}self_attn.q_proj.weight": (width, width),
            f"{prefix}self_attn.k_proj.weight": (kv, width),
            f"{prefix}self_attn.v_proj.weight": (kv, width),
            f"{prefix}self_attn.o_proj.weight": (width, width),
            f"{prefix}mlp.gate_proj.weight": (inner, width),
            f"{prefix}mlp.up_proj.weight": (inner, width),
            f"{prefix}mlp.down_proj.weight": (width, inner),
        }
    tensors = {
        name: np.ones(shape, np.float32) if len(shape) == 1 else rng.normal(0, 0.13, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    config = {
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": width, "intermediate_size": inner,
        "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 96, "tie_word_embeddings": True,
    }  # fmt: skip
    return Checkpoint(name="tiny", config=config, tensors=tensors, tokenizer=None, end_token_ids=())


def load_native(checkpoint: Checkpoint, dtype: str) -> Model:
    from sakiyomi.models.native import NativeModel

    return NativeModel.load(checkpoint, dtype=dtype, threads=2)  # type: ignore[arg-type]


def load_torch(checkpoint: Checkpoint) -> Model:
    pytest.importorskip("torch")
    from sakiyomi.models.torch import TorchModel

    return TorchModel.load(checkpoint, dtype="float64")


@pytest.fixture(
    params=[
        pytest.param("int8", marks=needs_native),
        pytest.param("float32", marks=needs_native),
        "torch",
    ],
    scope="module",
)
def model(request, checkpoint: Checkpoint) -> Model:
    return load_torch(checkpoint) if request.param == "torch" else load_native(checkpoint, request.param)


def make(model: Model, **options: object) -> LayerskipDrafter:
    return LayerskipDrafter(LayerskipDrafter.Config(**options), DrafterContext(model, lambda name: model))


def start(model: Model, params: SamplingParams, prompt: Seq[int] = PROMPT, seed: int = 5) -> Sequence:
    return Sequence("0", list(prompt), len(prompt), params, seed, model.new_cache())


class RecordingVerifier(Verifier):
    """`match`, with the rows it was shown."""

    is_lossless = "tokens"

    def __init__(self) -> None:
        self.rows: list[np.ndarray] = []

    def verify(self, draft: Draft, output: Output, sequence: Sequence) -> Verdict:
        verdict = follow_choices(draft, output, sequence)
        self.rows += [np.array(output.row(row)) for row in (0, *(node + 1 for node in verdict.path))]
        return verdict


class Forgetful(LayerskipDrafter):
    """The same drafts without what was computed on the way."""

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        return [replace(draft, computed=None) for draft in super().propose(sequences, budgets)]


def run(model: Model, drafter: Drafter, sequences: Seq[Sequence], budget: int = 64) -> tuple[list[Step], list]:
    verifier, steps = RecordingVerifier(), []
    for sequence in sequences:
        prefill(model, drafter, sequence)
    while open_ones := [sequence for sequence in sequences if sequence.finish_reason is None]:
        steps += step(model, drafter, verifier, open_ones, [budget] * len(open_ones))
    return steps, verifier.rows


SHAPES = {
    "chain": {"num_speculative_tokens": 3},
    "long": {"num_speculative_tokens": 6},
    "tree": {"num_speculative_tokens": 3, "width": 2, "max_nodes": 7},
    "wide": {"num_speculative_tokens": 4, "width": 3, "max_nodes": 40},
}


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("exit_layer", [1, 3, 5])
def test_tokens_and_bits_are_those_of_plain_decoding(model, params, shape, exit_layer) -> None:
    plain = start(model, params)
    _, plain_rows = run(model, NoneDrafter(), [plain])
    drafted = start(model, params)
    steps, rows = run(model, make(model, exit_layer=exit_layer, **SHAPES[shape]), [drafted])
    assert drafted.tokens == plain.tokens
    assert sum(s.num_draft for s in steps) > 0
    if exit_layer == NUM_LAYERS and params is GREEDY:
        assert all(s.num_accepted == len(s.tokens) - 1 for s in steps)
        assert len(steps) < len(plain_rows) / 3
    if model.info.is_bit_exact:
        assert all(np.array_equal(one, other) for one, other in zip(rows[: len(plain_rows)], plain_rows, strict=True))
    else:
        np.testing.assert_allclose(rows, plain_rows, atol=1e-9)


@pytest.mark.parametrize("skip", ["2", "1-3", "3-4"])
@pytest.mark.parametrize("shape", ["chain", "wide"])
def test_skipped_layers_change_no_bit(model, skip, shape) -> None:
    plain, drafted = start(model, WARM), start(model, WARM)
    _, plain_rows = run(model, NoneDrafter(), [plain])
    steps, rows = run(model, make(model, skip=skip, **SHAPES[shape]), [drafted])
    assert drafted.tokens == plain.tokens
    assert sum(s.num_accepted for s in steps) > 0
    if model.info.is_bit_exact:
        assert all(np.array_equal(one, other) for one, other in zip(rows, plain_rows, strict=True))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", [{"exit_layer": 2}, {"skip": "2-3"}], ids=["exit", "skip"])
def test_each_layer_runs_once_over_each_row(model, shape, options) -> None:
    """The counter of layer-rows: what drafted is not run again, what did not draft runs once over all rows."""
    drafter = make(model, **options, **SHAPES[shape])
    sequence = start(model, GREEDY)
    prefill(model, drafter, sequence)
    for _ in range(3):
        before = model.decoder.num_rows  # type: ignore[attr-defined]
        done = step(model, drafter, MatchVerifier(), [sequence], [64])[0]
        rows = model.decoder.num_rows - before  # type: ignore[attr-defined]
        assert rows[:2].tolist() == [done.num_draft + 1] * 2
        assert rows[2:4].tolist() == [done.num_draft + 1] * 2
        fed = rows[4] - done.num_draft - 1
        if "skip" in options:
            assert 0 < fed <= done.num_draft  # the last layer of a skip set is the drafter's own
        else:
            assert fed == 0


def test_without_reuse_the_first_layers_run_twice(model) -> None:
    context = DrafterContext(model, lambda name: model)
    config = LayerskipDrafter.Config(exit_layer=2, num_speculative_tokens=3)
    rows = {}
    for kind in (LayerskipDrafter, Forgetful):
        sequence = start(model, GREEDY)
        drafter = kind(config, context)
        prefill(model, drafter, sequence)
        before = model.decoder.num_rows  # type: ignore[attr-defined]
        step(model, drafter, MatchVerifier(), [sequence], [64])
        rows[kind] = (model.decoder.num_rows - before).tolist()  # type: ignore[attr-defined]
    assert rows == {LayerskipDrafter: [4, 4, 4, 4, 4], Forgetful: [7, 7, 4, 4, 4]}


def test_batches_mix_rows_with_and_without_drafts(model) -> None:
    prompts = [PROMPT, [7], [1, 2, 3, 4, 5, 6], [9, 9]]
    plain = [start(model, WARM, prompt, seed) for seed, prompt in enumerate(prompts)]
    for sequence in plain:
        run(model, NoneDrafter(), [sequence])
    drafted = [start(model, WARM, prompt, seed) for seed, prompt in enumerate(prompts)]
    drafter = make(model, exit_layer=2, num_speculative_tokens=3)
    for sequence in drafted:
        prefill(model, drafter, sequence)
    budgets = [3, 0, 1, 64]
    while open_ones := [i for i, sequence in enumerate(drafted) if sequence.finish_reason is None]:
        step(model, drafter, MatchVerifier(), [drafted[i] for i in open_ones], [budgets[i] for i in open_ones])
    assert [sequence.tokens for sequence in drafted] == [sequence.tokens for sequence in plain]


def test_two_exits_in_one_pass(model) -> None:
    """Spans that go on from different layers, and one that goes on from none, share a forward pass."""
    tokens, parents = [5, 6, 7, 8], [-1, 0, 0, 1]
    caches, offers = [], []
    for exit_layer in (0, 1, 3, 5):
        cache = model.new_cache()
        model.forward([Span(cache, PROMPT, range(-1, len(PROMPT) - 1))])
        cache.keep(range(len(PROMPT)))
        offer = None
        if exit_layer:
            offer = model.shallow(exit_layer).forward([Span(cache, tokens[:3], parents[:3])])[0].computed
            assert len(offer) == 3
        caches.append(cache)
        offers.append(offer)
    taps = (3, 5)
    spans = [Span(c, tokens, parents, range(4), taps, o) for c, o in zip(caches, offers, strict=True)]
    outputs = model.forward(spans)
    for output in outputs[1:]:
        for row in range(4):
            close(model, output.row(row), outputs[0].row(row))
        if output is not outputs[3]:
            close(model, output.taps, outputs[0].taps)


def close(model: Model, one: object, other: object) -> None:
    if model.info.is_bit_exact:
        assert np.array_equal(one, other)
    else:
        np.testing.assert_allclose(one, other, atol=1e-9)


@pytest.mark.parametrize("spoil", ["tokens", "keep", "pass", "other"])
def test_an_offer_that_no_longer_holds_is_not_taken_up(model, spoil) -> None:
    def fresh():
        cache = model.new_cache()
        model.forward([Span(cache, PROMPT, range(-1, len(PROMPT) - 1))])
        cache.keep(range(len(PROMPT)))
        return cache

    cache, tokens = fresh(), [5, 6, 7]
    offer = model.shallow(2).forward([Span(cache, tokens, [-1, 0, 1])])[0].computed
    if spoil == "tokens":
        tokens = [5, 7, 7]
    elif spoil == "keep":
        cache.keep(())
    elif spoil == "pass":
        model.forward([Span(cache, [1, 2, 3], [-1, 0, 1])])
    else:
        cache = fresh()
    output = model.forward([Span(cache, tokens, [-1, 0, 1], range(3), (), offer)])[0]
    expected = model.forward([Span(fresh(), tokens, [-1, 0, 1], range(3))])[0]
    for row in range(3):
        close(model, output.row(row), expected.row(row))
    cache.keep(range(3))
    again = model.forward([Span(cache, [4], [-1], [0])])[0]
    whole = fresh()
    model.forward([Span(whole, tokens, [-1, 0, 1])])
    whole.keep(range(3))
    close(model, again.row(0), model.forward([Span(whole, [4], [-1], [0])])[0].row(0))


def test_the_cache_grows_under_pending_rows(model) -> None:
    """The first room of a cache is 64 slots; drafts reach over its end."""
    params = SamplingParams(temperature=0, max_tokens=60)
    plain, drafted = start(model, params), start(model, params)
    run(model, NoneDrafter(), [plain])
    run(model, make(model, exit_layer=5, num_speculative_tokens=7), [drafted])
    assert drafted.tokens == plain.tokens


def test_tuned_choices() -> None:
    model = ToyModel(random_law(VOCAB, 2), VOCAB, num_layers=6)

    def build(tuned: dict[str, object], **options: object) -> LayerskipDrafter:
        context = DrafterContext(model, lambda name: model, tuned={"layerskip": tuned} if tuned else {})
        return LayerskipDrafter(LayerskipDrafter.Config(**options), context)

    with pytest.raises(ParameterError, match="sakiyomi tune"):
        build({})
    pays = {"pays": True, "exit_layer": 2, "skip": "", "num_speculative_tokens": 3, "speedup": 1.4}
    assert build(pays).num_tokens == 3
    assert build(pays, num_speculative_tokens=5).num_tokens == 5
    assert build(pays).model.info.num_layers == 6  # a toy is its own first layers


def test_it_declines_where_tuning_found_no_gain(caplog: pytest.LogCaptureFixture) -> None:
    model = ToyModel(random_law(VOCAB, 2), VOCAB)
    tuned = {"layerskip": {"pays": False, "speedup": 0.81}}
    with caplog.at_level(logging.WARNING, logger="sakiyomi"):
        drafter = LayerskipDrafter(None, DrafterContext(model, lambda name: model, tuned=tuned))
    assert "0.81 times" in caplog.text
    steps, _ = run(model, drafter, [start(model, GREEDY)])
    assert sum(s.num_draft for s in steps) == 0


@pytest.mark.parametrize(
    "wrong",
    [{"exit_layer": 0}, {"exit_layer": 9}, {"skip": "5-3"}, {"skip": "x"}, {"width": 0}, {"draw": "soft"}],
)
def test_wrong_options_are_refused(wrong: dict[str, object]) -> None:
    model = ToyModel(random_law(VOCAB, 2), VOCAB)
    with pytest.raises(ParameterError, match=next(iter(wrong))):
        make(model, **{"exit_layer": 1, **wrong})


def test_layers_are_read_from_text() -> None:
    assert parse_layers("") == frozenset()
    assert sorted(parse_layers("4/10-12/20")) == [4, 10, 11, 12, 20]
