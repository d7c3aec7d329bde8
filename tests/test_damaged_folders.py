"""Model folders with any value under any key: a folder loads and answers, or one line names the file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sakiyomi import LLM, SamplingParams
from sakiyomi.assemble import ModelOptions, load_model
from sakiyomi.checkpoints.files import INDEX_KINDS
from sakiyomi.checkpoints.safetensors import CONFIG_KINDS, GENERATION_KINDS, TOKENIZER_KINDS
from sakiyomi.errors import CheckpointError, SakiyomiError

FILES: dict[str, list[str]] = {
    "config.json": [*CONFIG_KINDS, "rope_freq_factors"],
    "generation_config.json": list(GENERATION_KINDS),
    "tokenizer_config.json": list(TOKENIZER_KINDS),
    "special_tokens_map.json": list(TOKENIZER_KINDS),
    "tokenizer.json": ["added_tokens", "model", "decoder", "pre_tokenizer", "post_processor"],
    "model.safetensors.index.json": list(INDEX_KINDS),
}
PLACES = [(file, key) for file, keys in FILES.items() for key in keys]
ODD: list[Any] = [None, "abc", "\ud800", -1, 0, 1.5, 10**9, 10**400, float("nan"), float("inf"), True, [], {}]
ODD += [["x"], [None], [[]], {"a": 1}, {"a": {}}, {"0": {"content": 5}}, {"content": []}, [{"name": []}]]
ROPES = [
    {"rope_type": kind, "factor": factor, "rope_theta": theta}
    for kind in (["x"], "linear", "yarn", "llama3")
    for factor in ("x", float("nan"), 1e308, 10**400, 4)
    for theta in (1, 1e308, 1e-300)
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
SHORT = SamplingParams(temperature=0, max_tokens=2, min_tokens=1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, write_llama: Callable[..., Path]) -> Path:
    return write_llama(tmp_path_factory.mktemp("whole") / "model")


@pytest.fixture(scope="module")
def folder(whole: Path) -> Path:
    """A copy that a test may spoil; `spoil` starts afresh."""
    return whole.parent / "spoilt"


def spoil(whole: Path, folder: Path, file: str, change: Callable[[dict[str, Any]], None]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    if file == "model.safetensors.index.json":
        (folder / "model.safetensors").rename(folder / "part.safetensors")
    path = folder / file
    content = json.loads(path.read_text()) if path.exists() else {}
    change(content)
    path.write_text(json.dumps(content))


def refusal(folder: Path) -> str | None:
    """Why the folder does not answer; None if it does."""
    caught: SakiyomiError | None = None
    try:
        LLM.from_loaded(load_model(str(folder), ModelOptions(threads=1))).generate("ab", SHORT)
    except SakiyomiError as error:
        caught = error
    if caught is None:
        return None
    assert isinstance(caught, CheckpointError), repr(caught)
    assert "\n" not in str(caught)
    assert str(folder) in str(caught)
    return str(caught)


def test_the_whole_folder_answers(whole: Path, folder: Path) -> None:
    spoil(whole, folder, "config.json", lambda content: None)
    assert refusal(folder) is None


@pytest.mark.parametrize(("file", "key"), PLACES)
def test_odd_values_under_every_key(whole: Path, folder: Path, file: str, key: str) -> None:
    num_refused = 0
    for value in [*ODD, *(ROPES if key.startswith("rope_") and file == "config.json" else [])]:
        spoil(whole, folder, file, lambda content, value=value: content.update({key: value}))
        num_refused += refusal(folder) is not None
    assert num_refused > 0, "nothing that was tried is refused: the key is not read or not checked"


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("config.json", "model_type", ["llama"]),
        ("config.json", "rms_norm_eps", "1e-5"),
        ("config.json", "rope_scaling", "linear"),
        ("config.json", "quantization_config", 4),
        ("config.json", "eos_token_id", {"a": 1}),
        ("generation_config.json", "eos_token_id", [None]),
        ("tokenizer_config.json", "added_tokens_decoder", {"300": {}}),
        ("tokenizer_config.json", "bos_token", ["<s>"]),
        ("tokenizer_config.json", "chat_template", [1]),
        ("tokenizer_config.json", "additional_special_tokens", [5]),
    ],
)
def test_a_wrong_type_names_file_and_key(whole: Path, folder: Path, file: str, key: str, value: Any) -> None:
    spoil(whole, folder, file, lambda content: content.update({key: value}))
    told = refusal(folder)
    assert told is not None
    assert told.startswith(f"{folder / file}: {key} is ")


@pytest.mark.parametrize("key", ["dtype", "shape", "data_offsets"])
def test_odd_values_in_the_header_of_the_weights(whole: Path, folder: Path, key: str) -> None:
    odd = [*ODD, [1] * 100, [0, 10**30], [True, 64], ["64"], "12", [0, 0]]
    for value in odd:
        spoil(whole, folder, "config.json", lambda content: None)
        path = folder / "model.safetensors"
        raw = path.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + size])
        header["model.norm.weight"][key] = value
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])
        told = refusal(folder)
        assert told is not None, value
        assert "model.norm.weight" in told
        assert str(path) in told


def test_headers_and_files_nested_too_deep(whole: Path, folder: Path) -> None:
    for file in (*FILES, "model.safetensors"):
        spoil(whole, folder, file if file.endswith(".json") else "config.json", lambda content: None)
        deep = b"[" * 100_000
        prefix = len(deep).to_bytes(8, "little") if file == "model.safetensors" else b""
        (folder / file).write_bytes(prefix + deep)
        assert refusal(folder) is not None, file


@settings(max_examples=60)
@given(place=st.sampled_from(PLACES), value=JSON)
@example(place=("tokenizer_config.json", "extra_special_tokens"), value={"image": "a"})
def test_any_value_under_any_key(whole: Path, folder: Path, place: tuple[str, str], value: Any) -> None:
    file, key = place
    spoil(whole, folder, file, lambda content: content.update({key: value}))
    refusal(folder)
