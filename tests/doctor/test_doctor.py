"""`sakiyomi doctor`: sound heads of every layout pass, and each fault is named and makes the exit code 1."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from sakiyomi import LLM, SamplingParams
from sakiyomi.assemble import LoadedModel, ModelOptions, load_model, read_drafter_at
from sakiyomi.checkpoints.drafter import write_drafter
from sakiyomi.checkpoints.speculators import write_speculators
from sakiyomi.cli import app
from sakiyomi.cli import doctor as command
from sakiyomi.doctor.probe import Recorder, binomial_tail
from sakiyomi.doctor.weights import target_rows

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from heads import DRAFTED, TARGET, Arrays, eagle1_parts, eagle3_parts, medusa_parts, write_head

V, H = TARGET["vocab"], TARGET["hidden"]
NUM_TOKENS = 24
Parts = tuple[dict[str, Any], Arrays]
Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory, write_llama: Callable[..., Path]) -> Path:
    return write_llama(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(target_folder: Path) -> LoadedModel:
    return load_model(target_folder, ModelOptions(dtype="float32", threads=1))


@pytest.fixture
def doctor(target_folder: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command and return its JSON; `code` is what it ended with."""

    def run(path: Path, *more: str, tokens: int = NUM_TOKENS, target: Path | None = None) -> dict[str, Any]:
        options = ("--dtype", "float32", "--threads", "1", "--tokens", str(tokens), "--json")
        capsys.readouterr()
        code = app.run(["doctor", str(path), "--target", str(target or target_folder), *options, *more])
        told = capsys.readouterr()
        assert told.out, told.err
        return {**json.loads(told.out), "code": code}

    return run


def faults(result: dict[str, Any]) -> list[str]:
    return [f"{one['part']}: {one['found']}" for one in result["findings"] if one["is_fault"]]


# ---------------------------------------------------------------------------------------------- sound ones


def as_speculators(folder: Path, target: LoadedModel, parts: Parts) -> Path:
    first = read_drafter_at(write_head(folder / "official", *parts))
    lent = target.model.lend()
    assert lent is not None
    rows = target_rows(lent, lent.embedding, np.arange(V))
    options: dict[str, Any] = {"target_name": "m", "target_architecture": "LlamaForCausalLM", "embedding": rows}
    write_speculators(folder / "speculators", first, **options)
    return folder / "speculators"


LAYOUTS: dict[str, Callable[[Path, LoadedModel], Path]] = {
    "eagle1": lambda folder, target: write_head(folder, *eagle1_parts()),
    "eagle3": lambda folder, target: write_head(folder, *eagle3_parts()),
    "eagle3.1": lambda folder, target: write_head(folder, *eagle3_parts(fc_norm=True, norm_output=True)),
    "peagle": lambda folder, target: write_head(folder, *eagle3_parts(mask_token_id=5)),
    "speculators": lambda folder, target: as_speculators(folder, target, eagle3_parts()),
    "speculators peagle": lambda folder, target: as_speculators(folder, target, eagle3_parts(mask_token_id=5)),
    "medusa": lambda folder, target: write_head(folder, *medusa_parts(), name="medusa_lm_head.safetensors"),
    "medusa of vLLM": lambda folder, target: write_head(folder, *medusa_parts(vllm=True)),
    "a file of ours": lambda folder, target: as_own(folder, eagle3_parts()),
}


def as_own(folder: Path, parts: Parts) -> Path:
    stored = read_drafter_at(write_head(folder / "official", *parts))
    write_drafter(folder / "own.safetensors", stored)
    return folder / "own.safetensors"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sound_heads_pass(tmp_path: Path, target: LoadedModel, doctor: Run, layout: str) -> None:
    result = doctor(LAYOUTS[layout](tmp_path, target))
    assert result["code"] == 0, faults(result)
    assert result["healthy"] is True
    # Random weights: the probe runs, and says what they are worth.
    assert result["probe"]["is_chance"] is True
    assert result["probe"]["num_tokens"] == 3 * NUM_TOKENS
    assert [one["part"] for one in result["findings"]].count("acceptance") == 1
    assert doctor(Path(result["checkpoint"]), "--strict")["code"] == 1


def test_trained_files_of_ours_pass(trained_toy: Any, toy_mlp: Path, doctor: Run, target_folder: Path) -> None:
    result = doctor(toy_mlp, tokens=60, target=trained_toy.folder)  # no tokenizer: the prompts are made up
    assert result["code"] == 0, faults(result)
    assert result["probe"]["is_chance"] is False
    assert result["probe"]["mean_acceptance_length"] > 1.5
    other = doctor(toy_mlp, target=target_folder)
    assert other["code"] == 1
    assert faults(other)[0].startswith("target: made for")


# ---------------------------------------------------------------------------------------------- broken files


def break_head(fault: str) -> tuple[Parts, str]:
    """A head with one fault, and what must be named."""
    config, tensors = eagle3_parts()
    if fault == "layers that the target has not":
        return eagle3_parts(taps=(2, 15, 27)), "reads the layers [2, 15, 27]"
    if fault == "no lm_head":
        del tensors["lm_head.weight"]
        return (config, tensors), "lm_head.weight is missing"
    if fault == "a lm_head of zeros":
        tensors["lm_head.weight"] *= 0
        return (config, tensors), "lm_head.weight is all zero"
    if fault == "a dead part of fc":
        tensors["fc.weight"][:, H : 2 * H] = 0
        return (config, tensors), "its part for layer 1 is all zero"
    if fault == "fc of zeros":
        tensors["fc.weight"] *= 0
        return (config, tensors), "fc.weight is all zero"
    if fault == "ids in d2t":
        tensors["d2t"] = tensors["d2t"] + np.arange(DRAFTED)
        return (config, tensors), "target ids where offsets belong"
    if fault == "another vocabulary":
        return eagle3_parts(vocab=300), "its vocab_size is 257 and the drafter's target had 300"
    if fault == "norms without their flag":
        return (config, eagle3_parts(fc_norm=True)[1]), "fc_norm is False"
    if fault == "poison":
        tensors["midlayer.hidden_norm.weight"][5] = np.nan
        return (config, tensors), "no finite numbers"
    if fault == "left over":
        tensors["midlayer.self_attn.q_norm.weight"] = tensors["norm.weight"]
        return (config, tensors), "layers.0.self_attn.q_norm.weight"
    if fault == "a norm that EAGLE-1 has not":
        config, tensors = eagle1_parts()
        return (config, {**tensors, "norm.weight": np.ones(H, np.float32)}), "norm.weight, which no head of this kind"
    if fault == "a foreign embedding":
        rng = np.random.default_rng(77)
        return (config, {**tensors, "embed_tokens.weight": rng.normal(0, 1, (V, H)).astype(np.float32)}), "embed_tokens"
    if fault == "medusa for another vocabulary":
        config, tensors = medusa_parts()
        tensors |= {f"{head}.1.weight": tensors[f"{head}.1.weight"][:200] for head in range(3)}
        return (config, tensors), "200 rows"
    raise AssertionError(fault)


FAULTS = (
    "layers that the target has not", "no lm_head", "a lm_head of zeros", "a dead part of fc", "fc of zeros",
    "ids in d2t", "another vocabulary", "norms without their flag", "poison", "left over",
    "a norm that EAGLE-1 has not", "a foreign embedding", "medusa for another vocabulary",
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_broken_heads_are_refused(tmp_path: Path, doctor: Run, fault: str) -> None:
    parts, told = break_head(fault)
    result = doctor(write_head(tmp_path, *parts), tokens=0)
    assert result["code"] == 1
    assert any(told in one for one in faults(result)), faults(result)


@pytest.mark.parametrize("offset", [1, -1])
def test_rows_at_other_ids_are_found(tmp_path: Path, target: LoadedModel, doctor: Run, offset: int) -> None:
    config, tensors = eagle3_parts()
    lent = target.model.lend()
    assert lent is not None
    ids = np.arange(DRAFTED) + tensors["d2t"]
    tensors["lm_head.weight"] = target_rows(lent, lent.head, ids)
    assert doctor(write_head(tmp_path / "good", config, tensors), tokens=0)["code"] == 0
    tensors["lm_head.weight"] = target_rows(lent, lent.head, np.clip(ids + offset, 0, V - 1))
    result = doctor(write_head(tmp_path / "bad", config, tensors), tokens=0)
    assert result["code"] == 1
    assert "at other ids than d2t names" in faults(result)[0]


def test_warnings_leave_the_exit_code(tmp_path: Path, doctor: Run) -> None:
    config, tensors = eagle3_parts(rope_theta=500000.0)
    del config["eagle_config"]
    tensors["d2t"][:] = 0
    tensors["t2d"] = np.arange(V) < DRAFTED
    tensors["midlayer.mlp.down_proj.weight"] *= 0
    result = doctor(write_head(tmp_path, config, tensors), tokens=0)
    warned = {one["part"] for one in result["findings"] if not one["is_fault"]}
    assert warned == {"rope_theta", "layer ids", "d2t", "layers.0.mlp.down_proj.weight"}
    # Two layers have no room for three taps, which is a fault of its own.
    assert [one.partition(":")[0] for one in faults(result)] == ["layer ids"]
    config, tensors = medusa_parts(vllm=True)
    tensors["blocks.1.layers.0.weight"] = tensors["blocks.0.layers.0.weight"]
    result = doctor(write_head(tmp_path / "m", {**config, "num_heads": 2}, tensors), tokens=0)
    assert result["code"] == 0
    assert {one["part"] for one in result["findings"]} == {"heads", "medusa_fc_bias", "heads.1"}


# ---------------------------------------------------------------------------------------------- what only drafts show


class Fitted:
    """A head that knows what the target answers to the doctor's prompts: `fc` solves for it, the layer does nothing.

    Args:
        ahead: which token is predicted; 1 is the one that belongs there.
    """

    def __init__(
        self,
        target: LoadedModel,
        *,
        taps: tuple[int, ...] = (0, 1),
        ahead: int = 1,
        is_head_the_targets: bool = False,
        **flags: Any,
    ) -> None:
        config, tensors = eagle3_parts(taps=taps, num_aux_hidden_states=len(taps), **flags)
        rng = np.random.default_rng(5)
        states, wanted = gather(target, taps, ahead)
        rows = rng.normal(0, 1, (V, H)).astype(np.float32)
        lent = target.model.lend()
        assert lent is not None
        tensors["lm_head.weight"] = target_rows(lent, lent.head, np.arange(V)) if is_head_the_targets else rows
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"midlayer.{name}.weight"] *= 1e-4
        scale = tensors["midlayer.hidden_norm.weight"] = np.exp(rng.normal(0, 2.5, H)).astype(np.float32)
        tensors["norm.weight"] = np.ones(H, np.float32)
        goal = tensors["lm_head.weight"][wanted] / (scale if flags.get("norm_before_residual") else 1)
        gram = states.T @ states + 1e-3 * np.eye(states.shape[1])
        tensors["fc.weight"] = np.linalg.solve(gram, states.T @ goal).T.astype(np.float32)
        config["draft_vocab_size"] = V
        tensors["d2t"], tensors["t2d"] = np.zeros(V, np.int64), np.ones(V, np.bool_)
        self.config, self.tensors = config, tensors


def gather(target: LoadedModel, taps: tuple[int, ...], ahead: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """For each place of the answers to the doctor's prompts the taps that a draft reads, and the token that follows."""
    from sakiyomi.decode import prefill
    from sakiyomi.doctor.probe import _sequence

    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    room = target.model.info.max_model_len - NUM_TOKENS - 1
    states, wanted = [], []
    for ids in command._read_prompts(target):
        prompt = ids[-room:]
        answer = LLM.from_loaded(target).generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        tokens = [*prompt, *answer[0].outputs[0].token_ids]
        recorder = Recorder(taps)
        prefill(target.model, recorder, _sequence(target.model, tokens))
        known = np.concatenate(recorder.parts)
        for place in range(len(prompt), len(tokens) - 1):
            states.append(known[place - 2])
            wanted.append(tokens[place - 1 + ahead])
    return np.array(states, np.float64), np.array(wanted)


def test_a_head_that_is_right_is_told_from_chance(tmp_path: Path, target: LoadedModel, doctor: Run) -> None:
    head = Fitted(target)
    result = doctor(write_head(tmp_path, head.config, head.tensors))
    assert result["code"] == 0, faults(result)
    probe = result["probe"]
    assert probe["agreement"] > 0.8
    assert probe["is_chance"] is False
    assert probe["mean_acceptance_length"] > 1.4


def test_wrong_layers_are_found(tmp_path: Path, target: LoadedModel, doctor: Run) -> None:
    head = Fitted(target, taps=(0, 1))
    folder = as_speculators(tmp_path, target, (head.config, head.tensors))
    assert doctor(folder)["code"] == 0
    config = json.loads((folder / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1]
    (folder / "config.json").write_text(json.dumps({**config, "eagle_aux_hidden_state_layer_ids": [1, 2]}))
    result = doctor(folder)
    assert result["code"] == 1
    assert [one.partition(":")[0] for one in faults(result)] == ["layer ids"]
    assert any("the layers [0, 1]" in one["expected"] for one in result["findings"])


def test_a_replaced_lm_head_is_found(tmp_path: Path, target: LoadedModel, doctor: Run) -> None:
    head = Fitted(target, is_head_the_targets=True)
    assert doctor(write_head(tmp_path / "a", head.config, head.tensors))["code"] == 0
    other = np.random.default_rng(9).normal(0, 1, (V, H)).astype(np.float32)
    result = doctor(write_head(tmp_path / "b", head.config, {**head.tensors, "lm_head.weight": other}))
    assert result["code"] == 1
    assert [one.partition(":")[0] for one in faults(result)] == ["lm_head"]


@pytest.mark.parametrize("is_before", [True, False])
def test_a_wrong_order_of_norms_is_found(tmp_path: Path, target: LoadedModel, doctor: Run, is_before: bool) -> None:
    head = Fitted(target, norm_before_residual=is_before)
    assert doctor(write_head(tmp_path / "a", head.config, head.tensors))["code"] == 0
    head.config["norm_before_residual"] = not is_before
    result = doctor(write_head(tmp_path / "b", head.config, head.tensors))
    assert result["code"] == 1
    assert [one.partition(":")[0] for one in faults(result)] == ["norm_before_residual"]


def test_a_head_of_the_wrong_place_is_found(tmp_path: Path, target: LoadedModel, doctor: Run) -> None:
    head = Fitted(target, ahead=0)
    result = doctor(write_head(tmp_path, head.config, head.tensors))
    assert result["code"] == 1
    assert [one.partition(":")[0] for one in faults(result)] == ["alignment"]


def test_the_report_of_a_person(tmp_path: Path, target_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_head(tmp_path, *break_head("a dead part of fc")[0])
    assert app.run(["doctor", str(folder), "--target", str(target_folder), "--tokens", "8"]) == 1
    told = capsys.readouterr().out
    for words in ("FAULT in fc.weight", "expected:", "do:", "tokens at", "FAULTY: 1 fault"):
        assert words in told
    assert app.run(["doctor", str(tmp_path / "none"), "--target", str(target_folder)]) == 1
    assert "there is no file or folder" in capsys.readouterr().err


def test_the_binomial_tail() -> None:
    assert binomial_tail(0, 9, 0.3) == 1
    assert binomial_tail(3, 3, 0.5) == pytest.approx(0.125)
    assert binomial_tail(2, 3, 0.5) == pytest.approx(0.5)
    assert binomial_tail(1, 5, 0.0) == 0
