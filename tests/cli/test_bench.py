"""`sakiyomi bench`: table, JSON, chart and refusals, over a toy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sakiyomi.assemble import LoadedModel
from sakiyomi.cli import loading
from sakiyomi.models.toy import ToyModel
from sakiyomi.text.tokenizer import Tokenizer

Run = Callable[..., Any]
SHORT = ("--tokens", "8", "--rounds", "1", "--per-group", "1")


@pytest.fixture
def bench(run: Run, monkeypatch: pytest.MonkeyPatch, byte_tokenizer: Tokenizer) -> Run:
    def law(tokens: Any) -> Any:
        row = np.zeros(257, np.float32)
        row[tokens[-3]] = 20.0
        return row

    toy = ToyModel(law, 257)
    loaded = LoadedModel(model=toy, tokenizer=byte_tokenizer, chat_template=None, path=Path("no such file"))
    monkeypatch.setattr(loading, "fetch", lambda name: Path(name))
    monkeypatch.setattr("sakiyomi.assemble.load_model", lambda name, options: loaded)
    monkeypatch.setattr("sakiyomi.assemble.choose_backend", lambda options: "native")
    return lambda *arguments: run("bench", *arguments)


def test_the_table_has_a_row_for_each_way_and_group(bench: Run) -> None:
    result = bench("-d", "suffix", "-d", "ngram", "-g", "qa", "-g", "chat", *SHORT)
    assert result.code == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines() if line.strip()]
    assert [row[:2] for row in rows[2:11] if len(row) > 5] == [
        [group, drafter] for group in ("chat", "qa", "all") for drafter in ("none", "suffix", "ngram")
    ]
    assert "rule" not in rows[0]
    assert "speed" in rows[0]
    assert result.stdout.count(" yes") == 9


def test_what_differs_has_a_column(bench: Run) -> None:
    result = bench("-t", "0", "-t", "1", "--verifier", "match", "--verifier", "rejection", "-g", "qa", *SHORT)
    assert result.code == 0, result.stderr
    assert {"rule", "t"} <= set(result.stdout.split("\n")[1].split())
    assert " law" in result.stdout or "rejection" in result.stdout


def test_json_is_one_object(bench: Run, tmp_path: Path) -> None:
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"category": "mine", "turns": ["abcabc"]}\n')
    result = bench("--json", "--prompts", str(prompts), *SHORT)
    values = json.loads(result.stdout)
    assert [(row["group"], row["drafter"]) for row in values["rows"]] == [("mine", "none"), ("mine", "auto")]
    assert values["settings"]["num_tokens"] == 8
    assert values["provenance"]["command"].startswith("sakiyomi")


def test_a_chart_is_written(bench: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert bench("-g", "qa", "--png", str(tmp_path / "a.png"), *SHORT).code == 0
    assert (tmp_path / "a.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("--group", "poems"), 1, "no group 'poems'"),
        (("--prompts", "missing.jsonl"), 1, "cannot read the prompts"),
        (("--tokens", "0"), 1, "num_tokens=0"),
        (("-d", "sufix"), 1, "did you mean 'suffix'"),
        (("--verifier", "typical"), 1, "lossy"),
        (("--per-group", "0"), 2, "per-group"),
        (("--peer", "ollama"), 2, "there is transformers"),
        (("--peer-assistant", "small"), 2, "goes with --peer"),
        (("--png", "missing/a.png"), 1, "its folder does not exist"),
    ],
)
def test_a_wrong_command_is_one_line(bench: Run, arguments: tuple[str, ...], code: int, told: str) -> None:
    if "--png" in arguments:
        pytest.importorskip("matplotlib")
    result = bench(*arguments, *(() if {"--tokens", "--per-group"} & set(arguments) else SHORT))
    assert (result.code, result.stdout) == (code, "")
    assert result.stderr.count("\n") == 1
    assert told in result.stderr
