"""`sakiyomi demo` compares two answers; when they differ it must say so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from sakiyomi import assemble
from sakiyomi import llm as llm_module
from sakiyomi.cli import loading


def test_both_answers_and_both_speeds(run, llm) -> None:
    result = run("demo", "hello")
    assert result.code == 0, result.stderr
    assert result.stdout.count("The sky is blue") == 2
    assert result.stdout.count("64.0") == 2
    assert "The same 8 token ids, 1.00 times as fast.\n" in result.stdout
    assert "hello" in result.stdout


def test_the_model_is_loaded_once_and_first_answers_plainly(
    run, tmp_path: Path, write_llama: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[str] = []
    load_model = assemble.load_model
    monkeypatch.setattr(llm_module, "load_model", lambda name, options: loads.append(name) or load_model(name, options))
    folder = write_llama(tmp_path / "model")
    result = run("demo", "abcabcabc", "-n", "12", "-m", str(folder), "-d", "ngram:max_ngram=3")
    assert result.code == 0, result.stderr
    assert "The same 12 token ids" in result.stdout
    (passes,) = (line for line in result.stdout.splitlines() if "forward passes" in line)
    assert "12" in passes.split("│")[2], "the first answer took fewer passes than tokens: it was not plain"
    assert loads == [str(folder)]


@pytest.mark.parametrize(("prompt", "told"), [("", "the prompt is empty"), (" \n", "the prompt is empty")])
def test_what_generate_refuses_demo_refuses(run, llm, prompt: str, told: str) -> None:
    for command in ("generate", "demo"):
        result = run(command, prompt)
        assert (result.code, result.stdout) == (1, "")
        assert told in result.stderr


def test_a_difference_is_an_error(run, llm, fake_module, monkeypatch: pytest.MonkeyPatch) -> None:
    class WrongLLM(fake_module.FakeLLM):
        def _output(self, prompt, params, words) -> SimpleNamespace:
            output = super()._output(prompt, params, words)
            output.outputs[0].token_ids[2] = 0
            return output

    monkeypatch.setattr(loading, "share_plainly", lambda speculative: WrongLLM())
    result = run("demo", "hello")
    assert result.code == 1
    assert "differ from token 2 on" in result.stderr
    assert "The same" not in result.stdout
