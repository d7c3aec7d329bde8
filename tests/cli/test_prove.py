"""`sakiyomi prove`: exit codes and streams over a toy, and one short run on the real model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sakiyomi.assemble import LoadedModel
from sakiyomi.cli import loading
from sakiyomi.cli import prove as command
from sakiyomi.llm import LLM
from sakiyomi.models.toy import ToyModel, random_law
from sakiyomi.prove import certificate
from sakiyomi.prove.controls import ShiftControl
from sakiyomi.text.tokenizer import Tokenizer

Run = Callable[..., Any]
SHORT = ("--tokens", "16", "--draws", "200")


@pytest.fixture
def prove(run: Run, monkeypatch: pytest.MonkeyPatch, byte_tokenizer: Tokenizer) -> Run:
    """The command over a toy that repeats itself, so that `ngram` has something to guess."""
    law = random_law(4, 0, order=1, scale=1.0)

    def wide(tokens: Any) -> Any:
        row = law([token % 4 for token in tokens])
        return [*row, *([-50.0] * 253)]

    import numpy as np

    toy = ToyModel(lambda tokens: np.asarray(wide(tokens), np.float32), 257)
    loaded = LoadedModel(model=toy, tokenizer=byte_tokenizer, chat_template=None, path=Path("no such file"))
    monkeypatch.setattr(loading, "load_llm", lambda options: LLM.from_loaded(loaded))
    return lambda *arguments: run("prove", *arguments)


def test_a_proof_is_told_and_its_exit_code_is_0(prove: Run) -> None:
    for rule, told in (("match", "of the same bits"), ("rejection", "own distribution")):
        result = prove("--verifier", rule, *SHORT)
        assert result.code == 0, result.stdout + result.stderr
        words = " ".join(result.stdout.split())
        assert "PROVEN" in words
        assert told in words
        assert f"verifier: {rule}" in words
        assert result.stderr == ""


def test_json_is_one_object_and_html_is_a_page(prove: Run, tmp_path: Path) -> None:
    page, prompts = tmp_path / "page.html", tmp_path / "prompts.txt"
    prompts.write_text("abababab\n\ncdcdcdcd\n")
    result = prove("--json", "--html", str(page), "--prompts", str(prompts), "-t", "0", "-t", "1", "--tokens", "40")
    assert result.code == 0
    values = json.loads(result.stdout)
    assert values["proven"] is True
    assert values["provenance"]["num_prompts"] == 2
    assert values["provenance"]["settings"] == ["temperature 0", "temperature 1"]
    assert page.read_text().startswith("<!doctype html>")


def test_what_is_not_proven_ends_with_1(prove: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    result = prove("-d", "none", *SHORT)
    assert result.code == 1
    assert "VOID" in result.stdout
    real = certificate.certify

    def certify(loaded: Any, make: Any, verifier: Any, *rest: Any, **more: Any) -> Any:
        return real(loaded, make, ShiftControl(verifier), *rest, **more)

    monkeypatch.setattr(certificate, "certify", certify)
    result = prove(*SHORT, "--json")
    assert result.code == 1
    assert json.loads(result.stdout)["outcome"] == "refuted"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--verifier", "typical:lossy=true"), "typical is lossy"),
        (("--verifier", "typical"), "lossy"),
        (("--prompts", "missing.txt"), "cannot read the prompts"),
        (("--top-p", "0.5"), "--top-p and --top-k go with --temperature"),
        (("--draws", "0"), "num_draws=0"),
        (("-t", "0", "--tokens", "4", "--html", "missing/page.html"), "cannot write"),
    ],
)
def test_a_wrong_command_is_one_line(prove: Run, arguments: tuple[str, ...], told: str) -> None:
    result = prove(*arguments)
    assert (result.code, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1
    assert told in result.stderr


def test_prompts_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(" one \n\ntwo\n")
    assert command._read_prompts(file) == ["one", "two"]
    assert command._read_prompts(None) is None
    file.write_text("\n")
    with pytest.raises(command.ParameterError, match="holds no prompt"):
        command._read_prompts(file)
    file.write_text("x\n" * 65)
    with pytest.raises(command.ParameterError, match="at most 64"):
        command._read_prompts(file)


def test_a_short_run_on_the_real_model(run: Run, model_path: Path) -> None:
    for rule in ("match", "rejection"):
        result = run("prove", "-m", str(model_path), "--verifier", rule, "--tokens", "20", "--draws", "200", "--json")
        values = json.loads(result.stdout)
        assert (result.code, values["outcome"]) == (0, "proven"), values["reason"]
        assert values["provenance"]["backend"] == "native"
        assert len(values["provenance"]["model_sha256"]) == 64
