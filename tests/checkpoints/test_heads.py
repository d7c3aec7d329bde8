"""Published heads are read in one form, and what is wrong with a file is named before anything is drafted."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sakiyomi.assemble import read_drafter_at
from sakiyomi.checkpoints.speculators import write_speculators
from sakiyomi.errors import CheckpointError
from sakiyomi.types import DrafterFile

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from heads import DRAFTED, TARGET, eagle1_parts, eagle3_parts, medusa_parts, write_head


def same(left: DrafterFile, right: DrafterFile) -> bool:
    return (
        left.kind == right.kind
        and set(left.tensors) == set(right.tensors)
        and all(np.array_equal(np.asarray(left.tensors[n]), np.asarray(right.tensors[n])) for n in left.tensors)
        and np.array_equal(left.vocabulary, right.vocabulary)  # type: ignore[arg-type]
        and left.taps == right.taps
    )


@pytest.mark.parametrize("prefix", ["layers.0.", "model.layers.0."])
def test_names_of_all_projects_read_alike(tmp_path: Path, prefix: str) -> None:
    first = read_drafter_at(write_head(tmp_path / "a", *eagle3_parts()))
    config, tensors = eagle3_parts(prefix=prefix)
    tensors["draft_id_to_target_id"] = tensors.pop("d2t")
    if prefix.startswith("model."):
        tensors = {n if n.startswith(("model.", "lm_head", "t2d")) else f"model.{n}": t for n, t in tensors.items()}
    assert same(first, read_drafter_at(write_head(tmp_path / "b", config, tensors)))
    assert first.kind == "eagle3"
    assert len(first.vocabulary) == DRAFTED


def test_torch_files_are_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    config, tensors = eagle3_parts()
    first = read_drafter_at(write_head(tmp_path / "a", config, tensors))
    folder = tmp_path / "b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    torch.save({name: torch.from_numpy(value) for name, value in tensors.items()}, folder / "pytorch_model.bin")
    assert same(first, read_drafter_at(folder))
    (folder / "pytorch_model.bin").write_bytes(b"PK broken")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_drafter_at(folder)


def test_layer_numbers_of_both_conventions_are_the_same(tmp_path: Path) -> None:
    outputs = read_drafter_at(write_head(tmp_path / "a", *eagle3_parts(taps=(1, 14, 26))))
    inputs = read_drafter_at(write_head(tmp_path / "b", *eagle3_parts(taps=(2, 15, 27))))
    assert outputs.taps == inputs.taps == (2, 15, 27)


def test_kinds_are_told_apart(tmp_path: Path) -> None:
    assert read_drafter_at(write_head(tmp_path / "1", *eagle1_parts())).kind == "eagle1"
    assert read_drafter_at(write_head(tmp_path / "p", *eagle3_parts(mask_token_id=5))).kind == "peagle"
    official = read_drafter_at(write_head(tmp_path / "m", *medusa_parts(), name="medusa_lm_head.safetensors"))
    served = read_drafter_at(write_head(tmp_path / "v", *medusa_parts(vllm=True)))
    assert official.kind == "medusa"
    assert official.config["num_heads"] == 3
    assert same(official, served)


@pytest.mark.parametrize("flags", [{}, {"fc_norm": True, "norm_output": True}, {"norm_before_fc": True}])
def test_a_speculators_checkpoint_survives_the_round_trip(tmp_path: Path, flags: dict[str, Any]) -> None:
    first = read_drafter_at(write_head(tmp_path / "a", *eagle3_parts(**flags)))
    embedding = np.ones((TARGET["vocab"], TARGET["hidden"]), np.float32)
    options: dict[str, Any] = {"target_name": "some/model", "target_architecture": "LlamaForCausalLM"}
    with pytest.raises(CheckpointError, match="embed_tokens"):
        write_speculators(tmp_path / "b", first, **options)
    write_speculators(tmp_path / "b", first, **options, embedding=embedding)
    second = read_drafter_at(tmp_path / "b")
    assert {**first.config, "max_positions": 0} == {**second.config, "max_positions": 0}
    own = {name: tensor for name, tensor in second.tensors.items() if name != "embed_tokens.weight"}
    assert same(first, replace(second, tensors=own))
    write_speculators(tmp_path / "c", second, **options)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "c" / name).read_bytes()


def test_a_missing_norm_before_residual_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = read_drafter_at(write_head(tmp_path / "a", *eagle3_parts()))
    embedding = np.ones((TARGET["vocab"], TARGET["hidden"]), np.float32)
    write_speculators(
        tmp_path / "b", first, target_name="m", target_architecture="LlamaForCausalLM", embedding=embedding
    )
    path = tmp_path / "b" / "config.json"
    config = json.loads(path.read_text())
    del config["norm_before_residual"]
    path.write_text(json.dumps(config))
    assert read_drafter_at(tmp_path / "b").config["norm_before_residual"] is True
    assert "norm_before_residual" in caplog.text


def broken(fault: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """A head with one fault, and what the message must name."""
    config, tensors = eagle3_parts()
    if fault == "fc of another width":
        tensors["fc.weight"] = tensors["fc.weight"][:, :100]
        return config, tensors, "fc.weight reads 100 values"
    if fault == "missing norm":
        del tensors["norm.weight"]
        return config, tensors, "lacks tensor norm.weight"
    if fault == "norms without the flag":
        _, more = eagle3_parts(fc_norm=True)
        return config, more, "fc_norm is False"
    if fault == "flag without norms":
        return {**config, "norm_before_fc": True}, tensors, "lack input_norm.weight"
    if fault == "not a number":
        tensors["norm.weight"][3] = np.nan
        return config, tensors, "norm.weight holds values that are no finite"
    if fault == "ids instead of offsets":
        tensors["d2t"] = tensors["d2t"] + np.arange(DRAFTED)
        return config, tensors, "target ids where offsets belong"
    if fault == "ids beyond the vocabulary":
        tensors["d2t"] = tensors["d2t"] + TARGET["vocab"]
        return config, tensors, "ids from"
    if fault == "another head":
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:50]
        return config, tensors, "lm_head.weight has shape"
    if fault == "unknown tensor":
        tensors["midlayer.extra.weight"] = tensors["norm.weight"]
        return config, tensors, "layers.0.extra.weight"
    if fault == "other heads":
        return {**config, "num_attention_heads": 3, "head_dim": None}, tensors, "do not fit|heads of"
    raise AssertionError(fault)


FAULTS = (
    "fc of another width", "missing norm", "norms without the flag", "flag without norms", "not a number",
    "ids instead of offsets", "ids beyond the vocabulary", "another head", "unknown tensor", "other heads",
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(tmp_path: Path, fault: str) -> None:
    config, tensors, told = broken(fault)
    with pytest.raises(CheckpointError, match=told):
        read_drafter_at(write_head(tmp_path, config, tensors))


def test_medusa_heads_that_are_missing_are_told(tmp_path: Path) -> None:
    config, tensors = medusa_parts()
    with pytest.raises(CheckpointError, match="5 heads but the weights hold 3"):
        read_drafter_at(write_head(tmp_path, {**config, "medusa_num_heads": 5}, tensors))


def test_pairs_with_config_that_tells_fewer_heads_are_read(tmp_path: Path) -> None:
    config, tensors = medusa_parts()
    stored = read_drafter_at(write_head(tmp_path, {**config, "medusa_num_heads": 2}, tensors))
    assert stored.config["num_heads"] == 3
