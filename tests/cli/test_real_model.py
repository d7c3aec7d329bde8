"""The command line over the real model: the same answer by every way, and one-line errors for bad files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sakiyomi.cli import app, demo


@pytest.fixture
def generate(model_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: str, model: Path = model_path) -> tuple[int, str, str]:
        capsys.readouterr()
        code = app.run(["generate", *arguments, "--model", str(model)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_streamed_text_is_the_json_text_with_any_drafter(generate) -> None:
    prompt = (demo.PROMPT, "-n", "40")
    code, streamed, summary = generate(*prompt, "-d", "suffix")
    assert code == 0, summary
    answers = {name: json.loads(generate(*prompt, "--json", "-d", name)[1]) for name in ("none", "suffix", "auto")}
    assert streamed == answers["none"]["text"] + "\n"
    assert answers["suffix"]["token_ids"] == answers["none"]["token_ids"]
    assert answers["auto"]["token_ids"] == answers["none"]["token_ids"]
    assert answers["suffix"]["usage"] == answers["none"]["usage"]
    speculation = answers["suffix"]["speculation"]
    assert speculation["drafter"] == "suffix"
    assert speculation["num_accepted_tokens"] > 0
    assert f"{speculation['mean_acceptance_length']:.2f} tokens per step" in summary
    assert set(answers["none"]) >= {"text", "token_ids", "finish_reason", "usage", "speculation", "timing"}


def test_a_told_seed_repeats_the_answer(generate) -> None:
    sampled = ("Name a colour.", "-n", "12", "-t", "1", "--json")
    first = json.loads(generate(*sampled)[1])
    again = json.loads(generate(*sampled, "--seed", str(first["seed"]), "-d", "none")[1])
    assert again["token_ids"] == first["token_ids"]


def test_stop_and_raw(generate) -> None:
    answer = json.loads(generate("The days are Monday, Tuesday, Wednesday,", "--raw", "--stop", "Friday", "--json")[1])
    assert answer["finish_reason"] == "stop"
    assert answer["stop_reason"] == "Friday"
    assert "Thursday" in answer["text"]
    assert "Friday" not in answer["text"]


def test_a_prompt_beyond_the_context(generate) -> None:
    code, out, err = generate("word " * 100, "--max-model-len", "64")
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert "the context 64" in err


def test_a_cut_file(generate, model_path: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    with model_path.open("rb") as file:
        cut.write_bytes(file.read(3_000_000))
    code, out, err = generate("hi", model=cut)
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {cut}: the file is truncated")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("-d", "nonsense"), "known are"),
        (("-d", "ngram:nonsense=1"), "its options"),
        (("--verifier", "nonsense"), "known are"),
        (("--dtype", "nonsense"), "int8"),
        (("--backend", "nonsense"), "native"),
        (("--threads", "0"), "threads=0"),
        (("--max-model-len", "0"), "max_model_len=0"),
    ],
)
def test_a_wrong_name_lists_the_right_ones(generate, arguments: tuple[str, ...], told: str) -> None:
    code, out, err = generate("hi", *arguments)
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert told in err


def test_the_demo_shows_the_same_tokens_twice(model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["demo", "--model", str(model_path), "-n", "48"]) == 0
    shown = capsys.readouterr().out
    assert "The same 48 token ids" in shown
