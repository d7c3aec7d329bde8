"""The drafter in the box: found by name, for its model alone, and worth its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import sakiyomi
from sakiyomi import LLM, SamplingParams
from sakiyomi.assemble import LoadedModel, ModelOptions, load_model, make_drafter
from sakiyomi.checkpoints.drafter import find_packaged
from sakiyomi.decode import prefill, step
from sakiyomi.drafters.mlp import MlpDrafter
from sakiyomi.types import Sequence
from sakiyomi.verify.match import MatchVerifier

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


@pytest.mark.parametrize("width", [1, 2, 4])
def test_its_drafts_in_one_call_are_those_grown_by_levels(loaded: LoadedModel, width: int) -> None:
    """On several threads, for each step of an answer."""
    drafter = make_drafter(f"mlp:width={width},num_speculative_tokens=4,max_nodes=10", loaded, ModelOptions())
    assert isinstance(drafter, MlpDrafter)
    ids = LLM.from_loaded(loaded).render([{"role": "user", "content": "Tell me about the sea."}])
    params = SamplingParams(temperature=0, max_tokens=100)
    sequence = Sequence("0", list(ids), len(ids), params, 0, loaded.model.new_cache())
    prefill(loaded.model, drafter, sequence)
    sizes = set()
    for _ in range(30):
        room = drafter._find_room(sequence, 16)
        (at_once,) = drafter._draft_at_once([sequence], [room])
        assert at_once == drafter._draft_by_levels([sequence], [room])[0]
        sizes.add((len(at_once), max(at_once.depths)))
        step(loaded.model, drafter, MatchVerifier(MatchVerifier.Config()), [sequence], [16])
    assert sizes <= {(4, 4)} if width == 1 else len(sizes) > 1
