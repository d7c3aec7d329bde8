"""tune: agreement, costs and judgement, and the choice that later runs read."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sakiyomi.assemble import LoadedModel, ModelOptions, load_model
from sakiyomi.cli import app
from sakiyomi.errors import ParameterError
from sakiyomi.llm import LLM
from sakiyomi.measure import Spread
from sakiyomi.models.toy import ToyModel, random_law
from sakiyomi.params import SamplingParams
from sakiyomi.tune import (
    MAX_LENGTH,
    Candidate,
    Check,
    Costs,
    Tuning,
    compare_exits,
    judge,
    keep_choice,
    list_candidates,
    survivals_of,
    tune_layerskip,
)
from sakiyomi.tuned import load_choices, save_choices
from sakiyomi.types import Span

WriteLlama = Callable[..., Path]
EXIT = Candidate(exit_layer=2, skip="", num_leading=2)
FLAT = Costs(plain_s=0.01, passes=(1.0,) * (MAX_LENGTH + 1), drafts={EXIT: 0.1})


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAKIYOMI_CACHE", str(tmp_path / "cache"))


def test_candidates_are_exits_and_middles() -> None:
    assert [one.name for one in list_candidates(2)] == ["exit 1", "skip 1-1"]
    names = [one.name for one in list_candidates(30)]
    assert names[:29] == [f"exit {layer}" for layer in range(1, 30)]
    assert names[29:] == ["skip 14-16", "skip 12-18", "skip 10-19", "skip 8-22"]
    assert all(one.num_leading == int(one.skip.split("-")[0]) for one in list_candidates(30)[29:])


def test_survivals_are_runs_of_agreement() -> None:
    assert survivals_of([[True, True, False, True]], 3) == (0.75, 0.25, 0.0)
    assert survivals_of([[True] * 4, [False] * 4], 2) == (0.5, 0.375)
    assert survivals_of([], 2) == (0.0, 0.0)


def test_judgement_weighs_agreement_against_cost() -> None:
    sure, unsure = [[True] * 40], [[False, True] * 20]
    good = judge(EXIT, sure, FLAT, 4)
    assert (good.agreement, good.length) == (1.0, MAX_LENGTH)
    assert good.predicted > 3
    bad = judge(EXIT, unsure, FLAT, 4)
    assert (bad.agreement, bad.length) == (0.5, 1)
    dear = judge(EXIT, unsure, Costs(plain_s=0.01, passes=FLAT.passes, drafts={EXIT: 0.9}), 4)
    assert dear.predicted < 1 < bad.predicted


def test_reuse_is_part_of_the_prediction() -> None:
    """What the leading layers have done is not done again, so rows cost the remaining share more."""
    costs = Costs(plain_s=0.01, passes=tuple(1.0 + 0.5 * i for i in range(MAX_LENGTH + 1)), drafts={EXIT: 0.0})
    assert judge(EXIT, [[True] * 40], costs, 2).predicted > judge(EXIT, [[True] * 40], costs, 8).predicted


@pytest.mark.parametrize(("low", "pays"), [(1.01, True), (0.99, False)])
def test_only_a_sure_gain_is_chosen(low: float, pays: bool) -> None:
    check = Check(candidate=EXIT, length=3, speedup=Spread(1.2, low, 1.4), mean_acceptance_length=2.0)
    tuning = Tuning(model="m", num_prompts=1, num_tokens=9, plain_ms=1.0, pass_costs=(1.0,), exits=(), checks=(check,))
    assert tuning.choice == {
        "pays": pays, "exit_layer": 2, "skip": "", "num_speculative_tokens": 3, "speedup": 1.2,
    }  # fmt: skip


def test_agreement_is_that_of_the_first_layers_alone(tmp_path: Path, write_llama: WriteLlama) -> None:
    model = load_model(str(write_llama(tmp_path / "m")), ModelOptions(threads=1)).model
    prompt = [5, 6, 7]
    loaded = LoadedModel(model=model, tokenizer=None, chat_template=None, path=tmp_path)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    answer = LLM.from_loaded(loaded).generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
    for candidate, flags in compare_exits(model, list_candidates(2), prompt, answer):
        part = model.shallow(candidate.exit_layer, [1] if candidate.skip else [])
        tokens = [*prompt, *answer[:-1]]
        cache = part.new_cache()
        rows = range(len(prompt) - 1, len(tokens))
        guesses = part.forward([Span(cache, tokens, range(-1, len(tokens) - 1), rows)])[0].argmax()
        assert flags == [guess == token for guess, token in zip(guesses, answer, strict=True)]


def toy(agrees: bool) -> LoadedModel:
    law, other = random_law(31, 3), random_law(31, 4)
    model = ToyModel(law, 31, num_layers=4, shallow_law=law if agrees else other)
    return LoadedModel(model=model, tokenizer=None, chat_template=None, path=Path("toy"))


@pytest.mark.parametrize("agrees", [True, False])
def test_a_whole_run(agrees: bool) -> None:
    tuning = tune_layerskip(toy(agrees), [[1, 2, 3], [4]], num_tokens=12, num_rounds=5)
    assert (tuning.num_prompts, tuning.num_tokens) == (2, 24)
    assert all((one.agreement == 1) == agrees for one in tuning.exits)
    assert (tuning.best.mean_acceptance_length > 1.5) == agrees
    assert json.loads(json.dumps(tuning.to_json()))["choice"] == tuning.choice
    if not agrees:
        assert not tuning.choice["pays"]


@pytest.mark.parametrize(
    ("prompts", "num_tokens", "match"), [([], 9, "no prompt"), ([[]], 9, "empty"), ([[1]], 1, "num_tokens")]
)
def test_what_cannot_be_tuned_is_refused(prompts: list[list[int]], num_tokens: int, match: str) -> None:
    with pytest.raises(ParameterError, match=match):
        tune_layerskip(toy(True), prompts, num_tokens=num_tokens)
    single = LoadedModel(
        model=ToyModel(random_law(31, 3), 31, num_layers=1), tokenizer=None, chat_template=None, path=Path("toy")
    )
    with pytest.raises(ParameterError, match="single layer"):
        tune_layerskip(single, [[1]])


def test_choices_belong_to_the_files_and_the_variant(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"one")
    assert load_choices(model, "a") == {}
    save_choices(model, "a", {"layerskip": {"pays": True}})
    path = save_choices(model, "a", {"other": {"x": 1}})
    assert load_choices(model, "a") == {"layerskip": {"pays": True}, "other": {"x": 1}}
    assert load_choices(model, "b") == {}
    model.write_bytes(b"other")
    assert load_choices(model, "a") == {}
    path.write_text("damaged")
    assert load_choices(model, "a") == {}
    assert load_choices(tmp_path / "absent", "a") == {}


def test_the_command_and_the_drafter_that_reads_it(
    tmp_path: Path, write_llama: WriteLlama, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_llama(tmp_path / "m")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"category": "qa", "turns": ["Hello"]}\n')
    with pytest.raises(ParameterError, match="sakiyomi tune"):
        LLM(str(folder), drafter="layerskip")
    arguments = ["tune", "--model", str(folder), "--prompts", str(prompts), "--tokens", "8", "--rounds", "1"]
    assert app.run(arguments) == 0
    told = capsys.readouterr().out
    assert "exit 1 " in told
    assert "skip 1-1" in told
    assert "measured: " in told
    assert ("layerskip pays" in told) != ("does not pay" in told)
    assert app.run([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert Path(result["file"]).is_file()
    assert result["choice"]["exit_layer"] in (1, 2)

    loaded = load_model(str(folder), ModelOptions())
    speedup = Spread(1.5, 1.4, 1.6)
    check = Check(candidate=list_candidates(2)[0], length=2, speedup=speedup, mean_acceptance_length=2.0)
    shown = {"model": "m", "num_prompts": 1, "num_tokens": 8, "plain_ms": 1.0, "pass_costs": (1.0,), "exits": ()}
    keep_choice(loaded, Tuning(**shown, checks=(check,)))  # type: ignore[arg-type]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    plain = LLM(str(folder), drafter="none").generate("Hello", params)[0]
    drafted = LLM(str(folder), drafter="layerskip").generate("Hello", params)[0]
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert drafted.speculation.num_draft_tokens > 0
    check = Check(candidate=check.candidate, length=2, speedup=Spread(0.7, 0.6, 0.8), mean_acceptance_length=1.1)
    keep_choice(loaded, Tuning(**shown, checks=(check,)))  # type: ignore[arg-type]
    caplog.clear()
    assert LLM(str(folder), drafter="layerskip").generate("Hello", params)[0].speculation.num_draft_tokens == 0
    assert "0.70 times" in caplog.text


@pytest.mark.skipif(importlib.util.find_spec("sakiyomi._native") is None, reason="the native kernels are not built")
def test_exits_go_on_from_each_other(tmp_path: Path, write_llama: WriteLlama) -> None:
    """Comparing all exits runs each layer once over an answer."""
    model = load_model(str(write_llama(tmp_path / "m")), ModelOptions(threads=1)).model
    before = model.decoder.num_rows  # type: ignore[attr-defined]
    list(compare_exits(model, [one for one in list_candidates(2) if not one.skip], [5, 6, 7], [8, 9, 10, 11]))
    assert (model.decoder.num_rows - before).tolist() == [2 + 4, 2]  # type: ignore[attr-defined]
