"""The benchmark over toys and a tiny Llama: what is counted, what is compared, what is written."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sakiyomi.assemble import LoadedModel, ModelOptions, load_model
from sakiyomi.bench.run import Result, Row, Settings, run_benchmark
from sakiyomi.errors import MissingExtraError, ParameterError
from sakiyomi.measure import Spread
from sakiyomi.models.toy import ToyModel
from sakiyomi.params import SamplingParams
from sakiyomi.text.tokenizer import Tokenizer

GROUPS = {"one": ["abcabcabc", "xyxyxy"], "two": ["hello hello"]}


@pytest.fixture
def loaded(byte_tokenizer: Tokenizer) -> LoadedModel:
    """Says each byte of its text again, three later: everything can be looked up."""

    def law(tokens: Any) -> Any:
        row = np.zeros(257, np.float32)
        row[tokens[-3]] = 20.0
        return row

    return LoadedModel(model=ToyModel(law, 257), tokenizer=byte_tokenizer, chat_template=None, path=Path("toy"))


def _run(loaded: LoadedModel, **settings: Any) -> Result:
    return run_benchmark(loaded, ModelOptions(), GROUPS, Settings(num_tokens=24, num_rounds=2, **settings))


def test_every_drafter_rule_temperature_and_group_has_a_row_and_plain_is_the_base(loaded: LoadedModel) -> None:
    result = _run(loaded, drafters=("suffix", "none"), verifiers=("match", "rejection"), temperatures=(0.0, 1.0))
    found = [(row.temperature, row.group, row.drafter, row.verifier) for row in result.rows]
    arms = [("none", "match"), ("suffix", "match"), ("suffix", "rejection")]
    assert found == [(t, group, *arm) for t in (0.0, 1.0) for group in ("one", "two", "all") for arm in arms]
    plain = result.rows[0]
    assert plain.speedup == Spread(1.0, 1.0, 1.0)
    assert (plain.num_prompts, plain.num_tokens, plain.mean_acceptance_length) == (2, 48, 1.0)
    assert all(row.is_identical for row in result.rows if row.verifier == "match")
    assert [row.keeps for row in result.rows[:3]] == ["tokens", "tokens", "distribution"]


def test_positions_are_counted_marginally_and_conditionally(loaded: LoadedModel) -> None:
    row = _run(loaded, drafters=("ngram:num_speculative_tokens=2,min_ngram=3",)).rows[-1]
    assert row.mean_acceptance_length is not None
    assert 2 < row.mean_acceptance_length <= 3
    marginal, conditional = row.acceptance_per_position, row.conditional_acceptance
    assert len(marginal) == len(conditional) == 2
    assert row.mean_acceptance_length == pytest.approx(1 + sum(marginal))
    # Where the text repeats, what is drafted is right; some steps before it drafted nothing.
    assert marginal[1] <= marginal[0] < conditional[0] <= conditional[1] == 1
    assert row.draft_share is not None
    assert 0 < row.draft_share < 1


def test_rows_are_shown_as_they_come_and_the_result_is_json(loaded: LoadedModel) -> None:
    shown: list[Row] = []
    told: list[str] = []
    result = run_benchmark(
        loaded,
        ModelOptions(),
        {"one": ["abcabc"]},
        Settings(num_tokens=4, num_rounds=1),
        provenance={"command": "x"},
        report=lambda what, done, total: told.append(what),
        show=shown.append,
    )
    assert shown == result.rows
    assert told[0] == "warming up"
    values = json.loads(json.dumps(result.to_json()))
    assert values["provenance"]["command"] == "x"
    assert values["provenance"]["model"] == "toy"
    assert set(values["rows"][0]) >= {"group", "drafter", "tokens_per_s", "speedup", "is_identical", "draft_share"}
    assert set(values["rows"][0]["speedup"]) == {"value", "low", "high"}


def test_settings_are_checked() -> None:
    for name in ("num_tokens", "num_rounds"):
        with pytest.raises(ParameterError, match=f"{name}=0"):
            Settings(**{name: 0})


def test_a_chart_is_a_picture(loaded: LoadedModel, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from sakiyomi.bench.chart import draw_chart, group_bars

    result = _run(loaded, drafters=("suffix", "ngram"), temperatures=(0.0, 0.5))
    assert list(group_bars(result.rows)) == ["suffix, t=0", "ngram, t=0", "suffix, t=0.5", "ngram, t=0.5"]
    draw_chart(result, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ParameterError, match="cannot write"):
        draw_chart(result, tmp_path / "missing" / "speed.png")


def test_a_chart_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from sakiyomi.bench.chart import require_matplotlib

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"sakiyomi\[bench\]"):
        require_matplotlib()


def test_transformers_beside_us(write_llama: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from sakiyomi.bench.peers import TransformersPeer

    folder = write_llama(tmp_path / "llama")
    loaded = load_model(str(folder), ModelOptions(dtype="float32"))
    peer = TransformersPeer(loaded, assistant=folder, threads=1)
    settings = Settings(num_tokens=12, num_rounds=1)
    result = run_benchmark(loaded, ModelOptions(), {"one": ["abcabc", "xyxy"]}, settings, peers=peer.arms)
    assert [(row.engine, row.drafter) for row in result.rows] == [
        ("sakiyomi", "none"),
        ("sakiyomi", "auto"),
        ("transformers", "none"),
        ("transformers", "prompt lookup"),
        ("transformers", "assistant"),
    ]
    assert all(row.is_identical for row in result.rows[:3])
    assert result.rows[2].mean_acceptance_length == pytest.approx(1.0)
    assert result.rows[4].mean_acceptance_length > 2  # type: ignore[operator]  # its assistant is the model itself
    assert peer.arms(SamplingParams(temperature=1))[0].keeps == "distribution"
