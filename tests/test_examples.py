"""The examples run, and say what they should."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def run(
    write_llama: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., str]:
    """A function that runs an example on a tiny model and returns what it printed."""
    folder = write_llama(tmp_path / "model")

    def run(name: str, *arguments: str, model: bool = True) -> str:
        monkeypatch.setattr(sys, "argv", [name, *([str(folder)] if model else []), *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_every_example_is_tested() -> None:
    text = Path(__file__).read_text("utf-8")
    names = [path.name for path in EXAMPLES.glob("*.py")]
    assert len(names) >= 5
    assert [name for name in names if f'run("{name}"' not in text] == []


def test_generate(run: Callable[..., str]) -> None:
    for arguments in ((), ("ngram",)):
        shown = run("generate.py", *arguments)
        assert shown.startswith("One, two, three, one, two, three, one,")
        assert len(re.findall(r"\d+ tokens in \d+ steps, \d+ of them drafted; \d+ tokens/s", shown)) == 2


def test_stream(run: Callable[..., str]) -> None:
    shown = run("stream.py", "abcabcabcabcabc")
    assert shown.startswith("abcabcabcabcabc")
    assert re.search(r"[\d.]+ tokens per step$", shown.strip())


def test_prediction(run: Callable[..., str]) -> None:
    assert re.search(r"\d+ steps without the prediction, \d+ with it", run("prediction.py"))


def test_compare_drafters(run: Callable[..., str]) -> None:
    shown = run("compare_drafters.py")
    assert [line.split()[0] for line in shown.splitlines()[1:5]] == ["none", "ngram", "suffix", "suffix+ngram"]
    assert shown.strip().endswith("the same tokens from all of them: True")
    assert "suffix" in run("compare_drafters.py", "abab", "suffix")


def test_transformers_generate(run: Callable[..., str]) -> None:
    pytest.importorskip("transformers")
    shown = run("transformers_generate.py", model=False)
    assert shown.count("the same ids: True") == 3
