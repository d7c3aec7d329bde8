"""Folders that our own decoder does not know are run by transformers, and errors say what to do."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tiny_models import MODELS, Tiny, build  # noqa: E402

from sakiyomi import LLM, SamplingParams  # noqa: E402
from sakiyomi.assemble import ModelOptions, load_model  # noqa: E402
from sakiyomi.errors import CheckpointError, MissingExtraError, ParameterError  # noqa: E402
from sakiyomi.models.hf import HFModel, _context  # noqa: E402

PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
TEXT = "the cat sat on the mat, the cat sat on the"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer_json: str) -> Path:
    """A tiny GPT-2 with a tokenizer of bytes, as transformers saves it."""
    path = tmp_path_factory.mktemp("gpt2")
    options = MODELS["gpt2"].options | {"vocab_size": 257, "eos_token_id": 256}
    build(Tiny("GPT2Config", options, "trees")).save_pretrained(path)
    (path / "tokenizer.json").write_text(byte_tokenizer_json, encoding="utf-8")
    return path


@pytest.mark.parametrize("backend", ["auto", "hf"])
def test_a_folder_of_another_architecture_is_run_by_transformers(folder: Path, backend: str) -> None:
    llm = LLM(str(folder), backend=backend, drafter="ngram")  # type: ignore[arg-type]
    assert isinstance(llm.loaded.model, HFModel)
    assert (llm.info.architecture, llm.info.vocab_size, llm.info.end_token_ids) == ("gpt2", 257, (256,))
    (result,) = llm.generate(TEXT, PARAMS)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([result.prompt_token_ids])
    mask = torch.ones_like(ids)
    theirs = model.generate(ids, attention_mask=mask, max_new_tokens=24, eos_token_id=-1, do_sample=False)
    assert result.outputs[0].token_ids == theirs[0, ids.shape[1] :].tolist()


def test_our_own_decoder_comes_first_and_transformers_agrees(write_llama: Callable[..., Path], tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "llama")
    own = load_model(folder, ModelOptions(backend="torch"))
    foreign = load_model(folder, ModelOptions(backend="hf"))
    assert not isinstance(own.model, HFModel)
    assert isinstance(foreign.model, HFModel)
    answers = [LLM.from_loaded(one, drafter="suffix").generate(TEXT, PARAMS)[0].outputs[0] for one in (own, foreign)]
    assert answers[0].token_ids == answers[1].token_ids


def test_a_chat_goes_on_from_its_cache(folder: Path) -> None:
    template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"
    (folder / "chat_template.jinja").write_text(template)
    try:
        llm = LLM(str(folder), drafter="suffix")
        session = llm.session()
        for text in ("hello", "again"):
            pieces = list(session.stream(text, PARAMS))
        (fresh,) = llm.chat(session.messages[:-1], PARAMS)
        assert [piece.token_id for piece in pieces] == fresh.outputs[0].token_ids
    finally:
        (folder / "chat_template.jinja").unlink()


def test_without_the_extra_the_advice_is_to_install_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "transformers" else find_spec(name, *rest)
    )
    with pytest.raises(MissingExtraError, match=r"'gpt2' is not supported.*pip install \"sakiyomi\[torch\]\""):
        load_model(folder, ModelOptions())
    with pytest.raises(MissingExtraError, match="backend=hf needs transformers"):
        load_model(folder, ModelOptions(backend="hf"))


def test_a_backend_that_was_named_stays(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="model_type 'gpt2' is not supported"):
        load_model(folder, ModelOptions(backend="torch"))


def test_8_bit_weights_are_for_our_own_decoder(folder: Path) -> None:
    pytest.importorskip("sakiyomi._native")
    with pytest.raises(CheckpointError, match="model_type 'gpt2' is not supported"):
        load_model(folder, ModelOptions(dtype="int8"))


def test_what_transformers_cannot_load_is_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"n_layer": 3}))
    with pytest.raises(CheckpointError, match="lacks 12 tensors of GPT2LMHeadModel, such as transformer.h.2"):
        load_model(tmp_path, ModelOptions())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "no_such_model"}))
    with pytest.raises(CheckpointError, match="transformers cannot load") as caught:
        load_model(tmp_path, ModelOptions())
    assert "\n" not in str(caught.value)
    with pytest.raises(ParameterError, match="2 to 256 positions"):
        load_model(folder, ModelOptions(max_model_len=257))


def test_a_rotation_that_changes_with_the_length_bounds_the_context() -> None:
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    options = MODELS["phi3"].options | {"rope_scaling": scaling, "original_max_position_embeddings": 64}
    config = transformers.Phi3Config(**options)
    assert _context(config, None) == 64
