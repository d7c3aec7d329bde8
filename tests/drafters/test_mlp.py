"""The mlp drafter: the same proposals everywhere, the text that plain decoding writes, and laws that keep the law."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from sakiyomi.assemble import LoadedModel, ModelOptions, make_drafter, make_verifier
from sakiyomi.checkpoints.drafter import read_drafter, write_drafter
from sakiyomi.decode import prefill, step
from sakiyomi.drafters.mlp import MlpDrafter
from sakiyomi.drafters.none import NoneDrafter
from sakiyomi.errors import CheckpointError, ParameterError, SakiyomiError
from sakiyomi.models.toy import ToyModel, random_law
from sakiyomi.nets.mlp import HEAD
from sakiyomi.params import SamplingParams
from sakiyomi.prove.law import Bench, Context
from sakiyomi.prove.memo import remember
from sakiyomi.tree import Draft
from sakiyomi.types import Drafter, DrafterContext, Sequence
from trained_toy import TAPS, VOCAB

PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=40),
    "warm": SamplingParams(temperature=1, max_tokens=40),
    "nucleus": SamplingParams(temperature=0.8, top_p=0.9, top_k=20, max_tokens=40),
    "penalties": SamplingParams(temperature=1, max_tokens=40, frequency_penalty=0.4, min_tokens=5, logit_bias={3: 1.0}),
    "cold penalties": SamplingParams(temperature=0, max_tokens=40, repetition_penalty=1.2),
}


def make(model: Any, path: Path, draw: str = "coupled", **options: Any) -> MlpDrafter:
    config = MlpDrafter.Config(path=str(path), **options)
    return MlpDrafter(config, DrafterContext(model, lambda name: model, draw))  # type: ignore[arg-type]


def start(model: Any, prompt: Seq[int], params: SamplingParams, seed: int = 11) -> Sequence:
    return Sequence("0", list(prompt), len(prompt), params, seed, model.new_cache())


def run(model: Any, drafter: Drafter, prompt: Seq[int], params: SamplingParams, rule: str = "match") -> tuple[Any, ...]:
    """The tokens, and how many drafted ones were accepted."""
    sequence, verifier, accepted = start(model, prompt, params), make_verifier(rule), 0
    prefill(model, drafter, sequence)
    while sequence.finish_reason is None:
        accepted += step(model, drafter, verifier, [sequence], [16])[0].num_accepted
    return sequence.tokens, accepted


def proposals(model: Any, drafter: MlpDrafter, prompt: Seq[int], params: SamplingParams, chunk: int) -> list[Draft]:
    sequence, drafts = start(model, prompt, params), []
    prefill(model, drafter, sequence, chunk)
    while sequence.num_new < 12:
        drafts += drafter.propose([sequence], [8])
        step(model, drafter, make_verifier("match"), [sequence], [8])
    return drafts


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("params", ["greedy", "warm"])
def test_proposals_are_the_same_on_both_backends_and_for_every_chunk(
    trained_toy: Any, toy_mlp: Path, params: str, width: int
) -> None:
    long = [token for prompt in trained_toy.prompts for token in prompt] * 2
    found: list[list[Draft]] = []
    for backend in ("native", "torch"):
        model = trained_toy.load(backend)
        drafter = make(model, toy_mlp, width=width)
        assert drafter.taps == TAPS
        found += [proposals(model, drafter, long[:600], PARAMS[params], chunk) for chunk in (7, 512)]
        found.append(proposals(model, drafter, long[560:600], PARAMS[params], 1))
        found.append(proposals(model, drafter, long[560:600], PARAMS[params], 512))
    for one in (found[1], found[4], found[5]):
        assert [(d.tokens, d.parents, d.drawn) for d in one] == [(d.tokens, d.parents, d.drawn) for d in found[0]]
    for one in (found[3], found[6], found[7]):
        assert [(d.tokens, d.parents) for d in one] == [(d.tokens, d.parents) for d in found[2]]
    assert {d.drawn for d in found[0]} == {"fixed" if params == "greedy" else "coupled"}
    assert np.allclose(found[0][0].confidences, found[4][0].confidences, atol=1e-3)


def test_proposals_are_the_same_after_a_fork(trained_toy: Any, toy_mlp: Path) -> None:
    model = trained_toy.load()
    drafter = make(model, toy_mlp)
    whole = start(model, trained_toy.prompts[0], PARAMS["warm"])
    prefill(model, drafter, whole)
    fork = replace(whole, tokens=list(whole.tokens), cache=whole.cache.fork())
    for _ in range(3):
        assert drafter.propose([whole], [3]) == drafter.propose([fork], [3])
        for sequence in (whole, fork):
            step(model, drafter, make_verifier("match"), [sequence], [3])
        assert whole.tokens == fork.tokens


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("name", PARAMS)
def test_match_writes_the_tokens_of_plain_decoding(trained_toy: Any, toy_mlp: Path, name: str, width: int) -> None:
    model = trained_toy.load(dtype="int8")
    drafter = make(model, toy_mlp, width=width)
    accepted = 0
    for prompt in trained_toy.prompts[:4]:
        tokens, count = run(model, drafter, prompt, PARAMS[name])
        assert tokens == run(model, NoneDrafter(), prompt, PARAMS[name])[0]
        accepted += count
    assert accepted > 60


def test_a_batch_drafts_what_each_would_alone(trained_toy: Any, toy_mlp: Path) -> None:
    model = trained_toy.load()
    for width in (1, 2):
        drafter = make(model, toy_mlp, width=width)
        sequences = [start(model, p, one) for p, one in zip(trained_toy.prompts, PARAMS.values(), strict=False)]
        for sequence in sequences:
            prefill(model, drafter, sequence)
        budgets = [8, 2, 0, 3, 1]
        together = drafter.propose(sequences, budgets)
        alone = [drafter.propose([s], [b])[0] for s, b in zip(sequences, budgets, strict=True)]
        assert together == alone
        assert [len(draft) <= budget for draft, budget in zip(together, budgets, strict=True)] == [True] * 5


def compare_drafts(drafter: MlpDrafter, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
    """Drafts made in one call, which must be those that grow level by level, confidences to the last bit."""
    rooms = [drafter._find_room(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]
    at_once = drafter._draft_at_once(sequences, rooms)
    for one, room, sequence in zip(at_once, rooms, sequences, strict=True):
        assert one is not None
        if min(room.max_depth, room.max_nodes) > 0:
            assert one == drafter._draft_by_levels([sequence], [room])[0]
        else:
            assert one == Draft.empty()
    return [draft for draft in at_once if draft is not None]


@pytest.mark.parametrize("sharpness", [1.0, 1.7])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_greedy_drafts_in_one_call_are_those_grown_by_levels(
    trained_toy: Any, toy_mlp: Path, tmp_path: Path, dtype: str, sharpness: float
) -> None:
    stored = read_drafter(toy_mlp)
    path = tmp_path / "some.safetensors"
    ids = np.delete(np.arange(VOCAB, dtype=np.int32), [7, 30, 31])
    write_drafter(path, replace(stored, vocabulary=ids, config={**stored.config, "sharpness": sharpness}))
    model = trained_toy.load(dtype=dtype)
    kinds = [("coupled", PARAMS["greedy"]), ("independent", PARAMS["greedy"]), ("argmax", PARAMS["nucleus"])]
    shapes = [(1, 1, 8), (1, 4, 8), (2, 1, 8), (2, 3, 3), (2, 3, 20), (3, 4, 12), (4, 2, 2), (200, 2, 7), (8, 5, 100)]
    lengths = set()
    for i, (width, depth, nodes) in enumerate(shapes):
        draw, params = kinds[i % 3]
        for min_confidence in (0.0, 0.05, 0.6):
            options = {"num_speculative_tokens": depth, "max_nodes": nodes, "min_confidence": min_confidence}
            drafter = make(model, path, draw, width=width, **options)
            sequences = [start(model, prompt[: 3 + n % 9], params) for n, prompt in enumerate(trained_toy.prompts[:12])]
            for n, sequence in enumerate(sequences):
                sequence.end_ids = frozenset(range(n, VOCAB, 5))
                prefill(model, drafter, sequence)
            drafts = compare_drafts(drafter, sequences, [16, 3, 0, 1, *[100] * 8])
            assert {draft.drawn for draft in drafts} == {"fixed"}
            lengths |= {(len(draft), max(draft.depths, default=0)) for draft in drafts}
    assert len(lengths) > 15


def test_equal_logits_are_drafted_by_the_lowest_ids(trained_toy: Any, toy_mlp: Path, tmp_path: Path) -> None:
    model = trained_toy.load()
    stored, path = read_drafter(toy_mlp), tmp_path / "equal.safetensors"
    write_drafter(path, replace(stored, tensors={**stored.tensors, HEAD: np.zeros((VOCAB, 64), np.float32)}))
    sequence = start(model, trained_toy.prompts[0], PARAMS["greedy"])
    for width, tokens in ((1, (0, 0)), (3, (0, 1, 2, 0, 1))):
        options = {"num_speculative_tokens": 2, "max_nodes": 5}
        drafter = make(model, path, width=width, **options)
        prefill(model, drafter, sequence)
        assert compare_drafts(drafter, [sequence], [8])[0].tokens == tokens
        sequence = start(model, trained_toy.prompts[0], PARAMS["greedy"])


def test_what_one_call_cannot_draft_grows_by_levels(trained_toy: Any, toy_mlp: Path) -> None:
    model = trained_toy.load()
    drafter = make(model, toy_mlp)
    short = replace(PARAMS["greedy"], min_tokens=2)
    for params in (PARAMS["warm"], PARAMS["cold penalties"], short, replace(short, min_tokens=0, logit_bias={3: 1.0})):
        sequence = start(model, trained_toy.prompts[0], params)
        prefill(model, drafter, sequence)
        assert drafter._draft_at_once([sequence], [drafter._find_room(sequence, 8)]) == [None]
        assert len(drafter.propose([sequence], [8])[0]) == 3
    damaged = start(model, trained_toy.prompts[0], PARAMS["greedy"])
    prefill(model, drafter, damaged)
    damaged.memo = damaged.memo._replace(taps=damaged.memo.taps * np.float32(np.nan))
    with pytest.raises(SakiyomiError, match="hold nan"):
        drafter.propose([damaged], [8])


@pytest.mark.parametrize(("rule", "width"), [("rejection", 1), ("block", 1), ("tree", 2), ("traversal", 2)])
def test_distribution_rules_keep_the_law(trained_toy: Any, toy_mlp: Path, rule: str, width: int) -> None:
    model = trained_toy.load()
    wrap = remember({})
    config = MlpDrafter.Config(path=str(toy_mlp), width=width, num_speculative_tokens=2)
    drafter = MlpDrafter(config, DrafterContext(wrap(model), lambda name: model, "independent"))
    prompts = trained_toy.prompts
    contexts = [
        Context("a", tuple(prompts[0]), 12, SamplingParams(temperature=1.5, max_tokens=None), 6),
        Context("b", tuple(prompts[1]), 12, SamplingParams(temperature=2.0, top_p=0.9, max_tokens=None), 6),
    ]
    result = Bench(wrap(model), drafter, contexts).test(make_verifier(rule), 600, 1, name="rule")
    assert result.first_error is None
    assert not result.is_rejected
    assert 0 < result.num_accepted_tokens < result.num_draft_tokens


def test_sampled_drafts_tell_the_laws_they_were_drawn_from(trained_toy: Any, toy_mlp: Path, tmp_path: Path) -> None:
    """Also over a reduced vocabulary, under parameters that know ids, and without what cannot be drafted."""
    stored = read_drafter(toy_mlp)
    ids = np.arange(0, VOCAB - 1, 2, dtype=np.int32)
    path = tmp_path / "half.safetensors"
    write_drafter(path, replace(stored, vocabulary=ids))
    model = trained_toy.load()
    drafter = make(model, path, "independent", width=2)
    for params in (PARAMS["warm"], PARAMS["nucleus"], PARAMS["penalties"]):
        sequence = start(model, trained_toy.prompts[3], params)
        prefill(model, drafter, sequence)
        draft = drafter.propose([sequence], [8])[0]
        draft.check(VOCAB)
        assert draft.drawn == "without_replacement"
        assert set(draft.tokens) <= set(ids.tolist())
        assert all(set(row.tolist()) <= set(ids.tolist()) for row in draft.probs_ids or ())
        for rule, width in (("tree", 2), ("rejection", 1)):
            assert (
                run(model, make(model, path, "independent", width=width), trained_toy.prompts[3], params, rule)[1] > 0
            )


def test_unsure_guesses_are_left_out(trained_toy: Any, toy_mlp: Path) -> None:
    model = trained_toy.load()
    sequences = [start(model, prompt[:-1], PARAMS["greedy"]) for prompt in trained_toy.prompts]
    everything, sure = make(model, toy_mlp, width=2), make(model, toy_mlp, width=2, min_confidence=0.5)
    for sequence in sequences:
        prefill(model, everything, sequence)
    all_of_it, part = (drafter.propose(sequences, [8] * len(sequences)) for drafter in (everything, sure))
    for big, small in zip(all_of_it, part, strict=True):
        assert all(confidence >= 0.5 for confidence in small.confidences or ())
        assert {small.path(n) and tuple(small.tokens[i] for i in small.path(n)) for n in range(len(small))} <= {
            tuple(big.tokens[i] for i in big.path(n)) for n in range(len(big))
        }
    assert sum(map(len, part)) < sum(map(len, all_of_it))


def test_without_the_last_taps_nothing_is_drafted(trained_toy: Any, toy_mlp: Path) -> None:
    """Attached late or behind a rewind, the drafter waits for one step."""
    model = trained_toy.load()
    drafter = make(model, toy_mlp)
    sequence = start(model, trained_toy.prompts[0], PARAMS["greedy"])
    prefill(model, NoneDrafter(), sequence)
    assert drafter.propose([sequence], [3]) == [Draft.empty()]
    assert step(model, drafter, make_verifier("match"), [sequence], [3])[0].num_draft == 0
    assert step(model, drafter, make_verifier("match"), [sequence], [3])[0].num_draft == 3
    length = len(sequence.tokens) - 3
    del sequence.tokens[length:]
    sequence.cache.truncate(length - 1)
    drafter.rewind(sequence, length - 1)
    assert drafter.propose([sequence], [3]) == [Draft.empty()]


def test_wrong_targets_and_files_are_refused(trained_toy: Any, toy_mlp: Path, tmp_path: Path) -> None:
    model = trained_toy.load()
    stored = read_drafter(toy_mlp)
    path = tmp_path / "x.safetensors"
    for change, told in (
        ({"kind": "eagle3"}, "of kind 'eagle3'"),
        ({"target": {**stored.target, "vocab_size": 5}}, "its vocab_size is 96 and the drafter's target had 5"),
        ({"target": {**stored.target, "probe": [-p for p in stored.target["probe"]]}}, "those of another model"),
        ({"config": {}}, "not that of an mlp"),
        ({"tensors": {}}, "start.weight is missing"),
    ):
        write_drafter(path, replace(stored, **change))
        with pytest.raises(CheckpointError, match=told):
            make(model, path)
    with pytest.raises(CheckpointError, match="there is no drafter file"):
        make(model, tmp_path / "none.safetensors")
    with pytest.raises(ParameterError, match="lends"):
        make(ToyModel(random_law(5), 5), toy_mlp)
    with pytest.raises(ParameterError, match="no trained drafter comes with the package"):
        MlpDrafter(MlpDrafter.Config(), DrafterContext(model, lambda name: model))
    for wrong in ({"width": 0}, {"max_nodes": 0}, {"min_confidence": 1.0}, {"draw": "soft"}):
        with pytest.raises(ParameterError, match=next(iter(wrong))):
            MlpDrafter.Config(**wrong)


def test_an_int8_target_takes_the_drafter_of_a_float_one(trained_toy: Any, toy_mlp: Path) -> None:
    for backend, dtype in (("native", "int8"), ("torch", "bfloat16")):
        model = trained_toy.load(backend, dtype)
        assert run(model, make(model, toy_mlp), trained_toy.prompts[0], PARAMS["greedy"])[1] > 15


def test_it_is_found_by_name_and_joins_others(
    trained_toy: Any, toy_mlp: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = LoadedModel(model=trained_toy.load(), tokenizer=None, chat_template=None, path=trained_toy.folder)
    drafter = make_drafter(f"suffix:min_match=2+mlp:path={toy_mlp}", loaded, ModelOptions())
    assert drafter.taps == TAPS
    with caplog.at_level(logging.WARNING, logger="sakiyomi"):
        tokens, accepted = run(loaded.model, drafter, trained_toy.prompts[0], PARAMS["greedy"])
    assert tokens == run(loaded.model, NoneDrafter(), trained_toy.prompts[0], PARAMS["greedy"])[0]
    assert accepted > 15
    assert not caplog.records
