"""Names to objects: backends, second models and their vocabularies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sakiyomi import LLM, SamplingParams
from sakiyomi.assemble import ModelOptions, choose_backend, load_model
from sakiyomi.drafters.combined import CombinedDrafter
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.drafters.ngram import NgramDrafter
from sakiyomi.drafters.suffix import SuffixDrafter
from sakiyomi.errors import CheckpointError, ParameterError, UnknownNameError, VocabularyError

PARAMS = SamplingParams(temperature=1, top_p=0.9, seed=1, max_tokens=24, ignore_eos=True)
WriteLlama = Callable[..., Path]


@pytest.mark.parametrize(
    ("options", "backend"),
    [
        ({}, "native"),
        ({"dtype": "int8"}, "native"),
        ({"dtype": "float32"}, "native"),
        ({"dtype": "float32", "backend": "torch"}, "torch"),
        ({"dtype": "bfloat16"}, "torch"),
        ({"device": "cuda"}, "torch"),
        ({"device": "cuda", "dtype": "float32"}, "torch"),
        ({"backend": "hf"}, "hf"),
    ],
)
def test_the_backend_follows_from_dtype_and_device(options: dict[str, str], backend: str) -> None:
    assert choose_backend(ModelOptions(**options)) == backend  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "jax"}, "native, torch or hf"),
        ({"dtype": "int8", "backend": "hf"}, "native CPU backend only"),
        ({"dtype": "int4"}, "int8, float32"),
        ({"dtype": "int8", "device": "cuda"}, "native CPU backend only"),
        ({"dtype": "int8", "backend": "torch"}, "native CPU backend only"),
        ({"dtype": "bfloat16", "backend": "native"}, "int8 or float32"),
        ({"device": "cuda", "backend": "native"}, "on cpu"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        choose_backend(ModelOptions(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize("draft_vocab", [257, 300], ids=["same", "padded drafter"])
@pytest.mark.parametrize("target_vocab", [257, 320], ids=["same", "padded target"])
def test_vocabularies_that_differ_by_padding_go_together(
    tmp_path: Path, write_llama: WriteLlama, draft_vocab: int, target_vocab: int
) -> None:
    """Padding rows are random here, so they would be chosen if they had any probability."""
    target = write_llama(tmp_path / "target", vocab_size=target_vocab, seed=1)
    draft = write_llama(tmp_path / "draft", vocab_size=draft_vocab, seed=2)
    plain = LLM(str(target), drafter="none").generate("Hello", PARAMS)[0]
    drafted = LLM(str(target), drafter=f"model:model={draft}").generate("Hello", PARAMS)[0]
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert max(plain.outputs[0].token_ids) < 257
    assert drafted.speculation.num_draft_tokens > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_another_tokenizer_is_translated(
    tmp_path: Path, write_llama: WriteLlama, byte_tokenizer_json: str, temperature: float
) -> None:
    """A drafter with the target's weights and all ids named otherwise guesses as well as the target itself."""
    other = json.loads(byte_tokenizer_json)
    vocab = other["model"]["vocab"]
    first, second = list(vocab)[65:67]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    target = write_llama(tmp_path / "target")
    draft = write_llama(tmp_path / "draft", tokenizer=json.dumps(other))
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=24, ignore_eos=True)
    plain = LLM(str(target), drafter="none").generate("Hello", params)[0]
    drafted = LLM(str(target), drafter=f"model:model={draft}").generate("Hello", params)[0]
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids


def test_a_model_without_a_tokenizer_cannot_draft(tmp_path: Path, write_llama: WriteLlama) -> None:
    target, draft = write_llama(tmp_path / "target"), write_llama(tmp_path / "draft")
    (draft / "tokenizer.json").unlink()
    with pytest.raises(VocabularyError, match=r"no tokenizer.*such as suffix"):
        LLM(str(target), drafter=f"model:model={draft}")


def test_the_target_named_as_drafter_shares_its_weights(tmp_path: Path, write_llama: WriteLlama) -> None:
    target = write_llama(tmp_path / "target")
    llm = LLM(str(target), speculative_model=str(target), num_speculative_tokens=3)
    assert llm.drafter.model is llm.loaded.model  # type: ignore[attr-defined]
    output = llm.generate("Hello", PARAMS)[0]
    assert output.speculation.num_accepted_tokens == output.speculation.num_draft_tokens == 18


@pytest.mark.parametrize(
    ("verifier", "draw"),
    [("match", "coupled"), ("block", "independent"), ("traversal", "independent"), ("typical:lossy=true", "argmax")],
)
def test_the_rule_settles_how_the_drafter_draws(
    tmp_path: Path, write_llama: WriteLlama, verifier: str, draw: str
) -> None:
    target = write_llama(tmp_path / "target")
    llm = LLM(str(target), drafter=f"model:model={target}", verifier=verifier)
    assert llm.drafter.draw == draw  # type: ignore[attr-defined]
    stats = llm.generate("Hello", PARAMS)[0].speculation
    assert stats.verifier == verifier.partition(":")[0]
    assert stats.is_lossless == llm.verifier.is_lossless
    assert stats.num_accepted_tokens > 0
    if verifier == "block":
        assert stats.num_accepted_tokens == stats.num_draft_tokens
        assert stats.verifier_options == {}
    if verifier.startswith("typical"):
        assert stats.verifier_options == {"lossy": True, "epsilon": 0.09, "delta": 0.3}


def test_what_the_user_says_of_drawing_stands(tmp_path: Path, write_llama: WriteLlama) -> None:
    target = write_llama(tmp_path / "target")
    llm = LLM(str(target), drafter=f"model:model={target},draw=coupled", verifier="rejection")
    with pytest.raises(ParameterError, match="draw=independent or draw=argmax"):
        llm.generate("Hello", PARAMS)
    with pytest.raises(ParameterError, match="lossy=true"):
        LLM(str(target), verifier="lenient")


def test_a_drafter_with_a_shorter_context_stops_drafting(
    tmp_path: Path, write_llama: WriteLlama, caplog: pytest.LogCaptureFixture
) -> None:
    target = write_llama(tmp_path / "target")
    draft = write_llama(tmp_path / "draft", seed=2)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    plain = LLM(str(target), drafter="none").generate("Hello", PARAMS)[0]
    drafted = LLM(str(target), drafter=f"model:model={draft}").generate("Hello", PARAMS)[0]
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert [record.message for record in caplog.records if "exhausted" in record.message] != []


def test_backends_agree_up_to_rounding(tmp_path: Path, write_llama: WriteLlama) -> None:
    pytest.importorskip("torch")
    folder = write_llama(tmp_path / "target")
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    native = LLM(str(folder), dtype="float32").generate("Hello", params)[0]
    torch = LLM(str(folder), backend="torch").generate("Hello", params)[0]
    assert native.outputs[0].token_ids == torch.outputs[0].token_ids


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"\.gguf"):
        load_model(str(path), ModelOptions())


def test_a_mis_shaped_tensor_is_named(tmp_path: Path, write_llama: WriteLlama) -> None:
    from safetensors.numpy import load_file, save_file

    folder = write_llama(tmp_path / "target")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((96, 63), np.float32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight.*63.*64"):
        load_model(str(folder), ModelOptions())


def test_drafters_are_joined_by_a_plus(tmp_path: Path, write_llama: WriteLlama) -> None:
    target = write_llama(tmp_path / "a+b")
    llm = LLM(str(target), drafter=f"suffix:min_match=2,width=1+ngram:max_ngram=3+model:model={target}")
    drafter = llm.drafter
    assert isinstance(drafter, CombinedDrafter)
    assert [type(part) for part in drafter.parts] == [SuffixDrafter, NgramDrafter, ModelDrafter]
    assert drafter.parts[0].config == SuffixDrafter.Config(min_match=2, width=1)
    assert drafter.parts[1].config == NgramDrafter.Config(max_ngram=3)
    assert drafter.config.mode == "first"
    plain = LLM(str(target), drafter="none").generate("Hello", PARAMS)[0]
    drafted = llm.generate("Hello", PARAMS)[0]
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert drafted.speculation.drafter == "combined"


def test_combined_has_options_of_its_own(tmp_path: Path, write_llama: WriteLlama) -> None:
    target = write_llama(tmp_path / "target")
    llm = LLM(str(target), drafter="combined:mode=merge,parts=suffix:min_match=2,width=1+ngram")
    assert isinstance(llm.drafter, CombinedDrafter)
    assert llm.drafter.config.mode == "merge"
    assert [type(part) for part in llm.drafter.parts] == [SuffixDrafter, NgramDrafter]
    with pytest.raises(ParameterError, match="needs the option 'parts'"):
        LLM(str(target), drafter="combined:mode=merge")
    with pytest.raises(UnknownNameError, match="sufix"):
        LLM(str(target), drafter="combined:parts=sufix+ngram")
    with pytest.raises(ParameterError, match="no option 'widht'"):
        LLM(str(target), drafter="suffix:widht=1+ngram")


FORK_WHILE_BUSY = """
import os, sys, threading
from sakiyomi import LLM, SamplingParams
llm = LLM(sys.argv[1], drafter="ngram")
params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
expected = llm.generate("Hello", params)[0].outputs[0].token_ids
thread = threading.Thread(target=lambda: [llm.generate("Busy", params) for _ in range(30)])
thread.start()
for _ in range(8):
    pid = os.fork()
    if pid == 0:
        os._exit(0 if llm.generate("Hello", params)[0].outputs[0].token_ids == expected else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
thread.join()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_forked_while_another_thread_generates(tmp_path: Path, write_llama: WriteLlama) -> None:
    target = write_llama(tmp_path / "target")
    command = [sys.executable, "-W", "ignore", "-c", FORK_WHILE_BUSY, str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_a_tokenizer_that_knows_more_ids_than_the_model(tmp_path: Path, write_llama: WriteLlama) -> None:
    target = write_llama(tmp_path / "target", vocab_size=250)
    llm = LLM(str(target), drafter="none")
    assert llm.info.vocab_size == 250
    assert llm.generate("Hello", PARAMS)[0].outputs[0].finish_reason == "length"
    with pytest.raises(ParameterError, match="holds id 256; ids are 0 to 249"):
        llm.generate("Hello<end>", PARAMS)
