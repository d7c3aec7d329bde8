"""Prompts of files, and our own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sakiyomi.bench.prompts import read_prompts
from sakiyomi.errors import ParameterError


def _write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_our_own_prompts() -> None:
    groups = read_prompts()
    assert list(groups) == ["chat", "translation", "summarization", "qa", "math_reasoning", "rag"]
    assert all(len(texts) == 4 for texts in groups.values())
    assert len({text for texts in groups.values() for text in texts}) == 24
    assert max(len(text.split()) for text in groups["summarization"]) > 400


def test_categories_of_mt_bench_are_one_group(tmp_path: Path) -> None:
    questions = [
        {"question_id": 1, "category": "writing", "turns": ["a", "then b"]},
        {"question_id": 2, "category": "qa", "turns": ["c"]},
        {"question_id": 3, "category": "coding", "turns": ["d"]},
    ]
    path = _write(tmp_path / "q.jsonl", questions[0], "", *questions[1:])
    assert read_prompts(path) == {"mt_bench": ["a", "d"], "qa": ["c"]}
    assert read_prompts(path, per_group=1) == {"mt_bench": ["a"], "qa": ["c"]}
    assert read_prompts(path, groups=["qa"]) == {"qa": ["c"]}


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["[1"], "line 1 is no prompt"),
        ([{"category": "qa"}], "line 1 is no prompt"),
        ([{"category": "qa", "turns": []}], "line 1 is no prompt"),
        ([{"category": "qa", "turns": "text"}, {"category": "qa", "turns": [" "]}], "line 1: category is a text"),
        ([{"category": "qa", "turns": [" "]}], "line 1: category is a text"),
        ([{"category": 3, "turns": ["a"]}], "line 1: category is a text"),
        ([""], "holds no prompt"),
    ],
)
def test_what_is_no_prompt_is_told(tmp_path: Path, lines: list[object], told: str) -> None:
    with pytest.raises(ParameterError, match=told):
        read_prompts(_write(tmp_path / "q.jsonl", *lines))


def test_files_and_groups_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="cannot read the prompts"):
        read_prompts(tmp_path / "missing.jsonl")
    with pytest.raises(ParameterError, match="no group 'poems' among the prompts; there are chat"):
        read_prompts(groups=["poems"])
    (tmp_path / "latin").write_bytes(b"\xe9")
    with pytest.raises(ParameterError, match="not valid UTF-8"):
        read_prompts(tmp_path / "latin")


def test_spec_bench(spec_bench_path: Path) -> None:
    groups = read_prompts(spec_bench_path)
    assert {name: len(texts) for name, texts in groups.items()} == dict.fromkeys(groups, 80)
    assert len(groups) == 6
