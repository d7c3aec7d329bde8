"""A small cut of benchmarks/identity.py: the real model, every drafter, alone and in a batch, greedy and sampled."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from sakiyomi import LLM
from sakiyomi.assemble import LoadedModel, ModelOptions, load_model

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "identity.py"
spec = importlib.util.spec_from_file_location("identity", SCRIPT)
assert spec is not None
assert spec.loader is not None
identity = importlib.util.module_from_spec(spec)


@pytest.fixture(scope="module")
def loaded(model_path: Path) -> LoadedModel:
    import sys

    sys.modules["identity"] = identity
    spec.loader.exec_module(identity)
    return load_model(str(model_path), ModelOptions())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_drafter_gives_the_same_ids_and_the_same_bits(loaded: LoadedModel, temperature: float) -> None:
    llm = LLM.from_loaded(loaded)
    prompts = [llm.render([{"role": "user", "content": text}]) for text in identity.OWN_PROMPTS]
    rows = identity.compare(loaded, prompts, num_tokens=20, temperatures=[temperature], batches=[1, 3])
    assert [row.drafter for row in rows if not row.is_identical] == []
    assert all(row.num_rows == 3 * 20 for row in rows)
    itself = [row for row in rows if row.drafter == "model"]
    assert all(row.num_accepted_tokens == row.num_draft_tokens > 0 for row in itself)
    planted = [row for row in rows if row.drafter == "planted"]
    assert all(0 < row.num_accepted_tokens < row.num_draft_tokens for row in planted)


def test_other_threads_give_the_same_bits(loaded: LoadedModel, model_path: Path) -> None:
    llm = LLM.from_loaded(loaded)
    prompts = [llm.render([{"role": "user", "content": identity.OWN_PROMPTS[1]}])]
    params = identity.SamplingParams(temperature=0, max_tokens=12)
    answers = []
    for threads in (1, 3):
        other = load_model(str(model_path), ModelOptions(threads=threads))
        answers.append(identity.answer_plainly(other.model, prompts, params)[0])
    assert answers[0].tokens == answers[1].tokens
    assert all((a == b).all() for a, b in zip(answers[0].rows, answers[1].rows, strict=True))
