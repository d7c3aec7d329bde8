"""The drafter in the box: found by name, for its model alone, and worth its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import sakiyomi
from sakiyomi import LLM, SamplingParams
from sakiyomi.assemble import LoadedModel, ModelOptions, load_model, make_drafter
from sakiyomi.checkpoints.drafter import find_packaged

MAX_BYTES = 12_000_000


@pytest.fixture(scope="module")
def loaded(model_path: Path) -> LoadedModel:
    return load_model(model_path, ModelOptions(threads=2))


@pytest.fixture(scope="module")
def prompts(spec_bench_path: Path) -> list[str]:
    lines = [json.loads(line) for line in spec_bench_path.read_text("utf-8").splitlines()]
    texts = [line["turns"][0] for line in lines if line["category"] in ("writing", "qa", "math_reasoning")]
    return [text for text in texts if len(text) < 250][:60:10]


def test_it_fits_in_the_box() -> None:
    folder = Path(sakiyomi.__file__).parent / "assets"
    files = list(folder.glob("*.safetensors"))
    assert files
    assert sum(file.stat().st_size for file in files) <= MAX_BYTES
    (packaged,) = find_packaged("mlp")
    assert packaged.taps[-1] == packaged.target["num_layers"] == 30
    assert packaged.vocabulary is not None
    assert packaged.recipe


def test_it_drafts_for_the_default_model(loaded: LoadedModel, prompts: list[str]) -> None:
    """Above lookup on prompts without repetition, with the very tokens of plain decoding."""
    params = SamplingParams(temperature=0, max_tokens=40)
    options = ModelOptions()
    answers = {}
    for spec in ("none", "suffix", "mlp", "suffix:min_match=2+mlp"):
        llm = LLM.from_loaded(loaded, drafter=make_drafter(spec, loaded, options))
        outputs = [llm.generate(llm.render([{"role": "user", "content": text}]), params)[0] for text in prompts]
        steps = sum(output.speculation.num_steps for output in outputs)
        accepted = sum(output.speculation.num_accepted_tokens for output in outputs)
        answers[spec] = [list(output.outputs[0].token_ids) for output in outputs], 1 + accepted / steps
    assert all(tokens == answers["none"][0] for tokens, _ in answers.values())
    assert answers["mlp"][1] > 1.25
    assert answers["suffix:min_match=2+mlp"][1] > answers["suffix"][1] + 0.1
