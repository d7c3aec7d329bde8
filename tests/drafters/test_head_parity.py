"""Trained heads of all families: one net on two backends, whatever the chunks of the prompt, and after a fork."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from sakiyomi import LLM, SamplingParams
from sakiyomi.assemble import LoadedModel, ModelOptions, load_model, make_drafter
from sakiyomi.decode import prefill, step
from sakiyomi.sampling import growth
from sakiyomi.sampling.growth import SubsetCandidates
from sakiyomi.types import Sequence
from sakiyomi.verify.match import MatchVerifier

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from heads import eagle1_parts, eagle3_parts, medusa_parts, write_head


def tame_eagle1() -> Any:
    """Without a norm at its end, states that are fed back grow, and so does rounding; small weights keep both small."""
    config, tensors = eagle1_parts()
    return config, {name: tensor * (1 if "norm" in name else 0.4) for name, tensor in tensors.items()}


FAMILIES: dict[str, tuple[str, Callable[[], Any]]] = {
    "eagle1": ("eagle3", tame_eagle1),
    "eagle3": ("eagle3", eagle3_parts),
    "eagle3.1": ("eagle3", lambda: eagle3_parts(fc_norm=True, norm_output=True)),
    "peagle": ("peagle", lambda: eagle3_parts(mask_token_id=5, norm_before_fc=True)),
    "medusa": ("medusa", medusa_parts),
}
TREES = {"eagle3": "width=3,max_nodes=9", "peagle": "width=3,max_nodes=9", "medusa": "tree=static,max_nodes=9"}
BACKENDS = ("native", "torch")
PROMPT = list(b"The river was wide, and the boat was small.")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, write_llama: Callable[..., Path]) -> Path:
    return write_llama(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("heads")
    return {family: write_head(folder / family, *parts()) for family, (_, parts) in FAMILIES.items()}


def load(folder: Path, backend: str) -> LoadedModel:
    if backend == "torch":
        pytest.importorskip("torch").set_num_threads(1)
    threads = 1 if backend == "native" else None
    return load_model(folder, ModelOptions(dtype="float32", backend=backend, threads=threads))  # type: ignore[arg-type]


def make(target: LoadedModel, family: str, heads: dict[str, Path], shape: str = "num_speculative_tokens=3") -> Any:
    return make_drafter(f"{FAMILIES[family][0]}:path={heads[family]},{shape}", target, ModelOptions())


def start(target: LoadedModel, drafter: Any, temperature: float, chunk: int = 256) -> Sequence:
    params = SamplingParams(temperature=temperature, max_tokens=60, ignore_eos=True)
    sequence = Sequence("s", list(PROMPT), len(PROMPT), params, 7, target.model.new_cache())
    prefill(target.model, drafter, sequence, chunk)
    return sequence


def run_steps(target: LoadedModel, drafter: Any, sequence: Sequence, count: int = 5) -> list[Any]:
    """The drafts of some steps, and of one behind them."""
    drafts = []
    for _ in range(count):
        drafts.append(drafter.propose([sequence], [9])[0])
        step(target.model, drafter, MatchVerifier(MatchVerifier.Config()), [sequence], [9])
    return [*drafts, drafter.propose([sequence], [9])[0]]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_drafts_are_those_of_torch(
    folder: Path, heads: dict[str, Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[npt.NDArray[Any]] = []

    def noting(logits: Any, *rest: Any) -> SubsetCandidates:
        rows.append(np.array(logits))
        return SubsetCandidates(logits, *rest)

    module = importlib.import_module(f"sakiyomi.drafters.{FAMILIES[family][0]}")
    monkeypatch.setattr(module, "SubsetCandidates", noting)
    monkeypatch.setattr(growth, "takes_the_best", lambda *given: False)  # one call shows no logits
    results = {}
    for backend in BACKENDS:
        target = load(folder, backend)
        for shape in ("num_speculative_tokens=3", f"num_speculative_tokens=3,{TREES[FAMILIES[family][0]]}"):
            drafter = make(target, family, heads, shape)
            rows.clear()
            drafts = run_steps(target, drafter, start(target, drafter, 0.0))
            results[backend, shape] = (drafts, np.stack(rows))
    for shape in {shape for _, shape in results}:
        (native, own), (torch, other) = (results[backend, shape] for backend in BACKENDS)
        assert len(own) >= 15
        np.testing.assert_allclose(own, other, rtol=0, atol=1e-4)
        assert [(d.tokens, d.parents) for d in native] == [(d.tokens, d.parents) for d in torch]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_of_the_prompt_leave_no_trace(folder: Path, heads: dict[str, Path], family: str, backend: str) -> None:
    target = load(folder, backend)
    for temperature in (0.0, 1.0):
        runs = []
        for chunk in (1, 7, 512):
            drafter = make(target, family, heads)
            drafts = run_steps(target, drafter, start(target, drafter, temperature, chunk))
            runs.append([(draft.tokens, draft.drawn) for draft in drafts])
        assert sum(len(tokens) for tokens, _ in runs[0]) >= 15
        assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_of_one_prompt_go_their_own_ways(folder: Path, heads: dict[str, Path], family: str) -> None:
    target = load(folder, "native")
    params = SamplingParams(n=3, temperature=1.0, max_tokens=16, seed=3, ignore_eos=True)
    request = {"prompt_token_ids": PROMPT}

    def answer(drafter: Any) -> tuple[list[list[int]], int]:
        (output,) = LLM.from_loaded(target, drafter=drafter).generate(request, params, use_tqdm=False)
        return [list(sample.token_ids) for sample in output.outputs], output.speculation.num_draft_tokens

    plain, _ = answer("none")
    drafted, num_drafted = answer(make(target, family, heads))
    assert drafted == plain
    assert len({tuple(tokens) for tokens in plain}) == 3
    assert num_drafted > 60


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_forked_process_drafts_the_same(folder: Path, heads: dict[str, Path], family: str) -> None:
    target = load_model(folder, ModelOptions(dtype="float32", threads=2))
    drafter = make(target, family, heads)
    sequence = start(target, drafter, 1.0)
    run_steps(target, drafter, sequence, 2)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:  # no pytest in the child, whatever happens
        try:
            os.write(writer, repr([draft.tokens for draft in run_steps(target, drafter, sequence, 3)]).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        told = pipe.read().decode()
    os.waitpid(pid, 0)
    assert told == repr([draft.tokens for draft in run_steps(target, drafter, sequence, 3)])


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_that_count_the_padding_in_are_cut(tmp_path: Path, write_llama: Callable[..., Path], family: str) -> None:
    """The tokenizer has 257 ids and the model 288 rows, as with Qwen's models; published heads tell of 288."""
    target = load(write_llama(tmp_path / "target", vocab_size=288), "native")
    assert (target.model.info.vocab_size, target.model.info.padded_vocab_size) == (257, 288)
    config, tensors = FAMILIES[family][1]() if "eagle" not in family else eagle3_parts(vocab=288)
    if family == "peagle":
        config, tensors = eagle3_parts(vocab=288, mask_token_id=5)
    if family == "eagle1":
        config, tensors = tame_eagle1()
        config["vocab_size"] = 288
    if family == "medusa":
        more = np.full((31, 64), 9.0, np.float32)  # what these rows say would win everywhere
        tensors |= {f"{head}.1.weight": np.concatenate([tensors[f"{head}.1.weight"], more]) for head in range(3)}
    heads = {family: write_head(tmp_path / "head", config, tensors)}
    drafter = make(target, family, heads)
    drafts = run_steps(target, drafter, start(target, drafter, 0.0))
    assert sum(len(draft) for draft in drafts) >= 15
    assert max(max(draft.tokens) for draft in drafts) < 257
