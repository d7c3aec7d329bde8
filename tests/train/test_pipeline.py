"""The stages together, through the command line: killed in each of them, and gone on with."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sakiyomi.assemble import LoadedModel, ModelOptions, make_drafter, read_drafter_at
from sakiyomi.checkpoints.drafter import read_drafter
from sakiyomi.cli.app import run
from sakiyomi.decode import prefill
from sakiyomi.errors import ParameterError
from sakiyomi.params import SamplingParams
from sakiyomi.train.data import load_corpus
from sakiyomi.train.files import hash_file
from sakiyomi.train.measure import MeasureConfig, choose_prompts, measure_drafter
from sakiyomi.train.pipeline import Pipeline
from sakiyomi.train.recipe import list_recipes, read_recipe
from sakiyomi.types import Sequence

SETTINGS = [
    *("data.num_tokens=4000", "data.batch=8", "data.unit_documents=8", "data.answer_tokens=40", "data.user_tokens=20"),
    *("measure.prompts=3", "measure.max_tokens=12", "measure.lengths=[1,3]", "measure.hold_out_every=6"),
]


def arguments(folder: Path, out: Path, *more: str) -> list[str]:
    changes = [part for setting in SETTINGS for part in ("--set", setting)]
    return ["train", "table", "--target", str(folder), "--out", str(out), "--threads", "1", *changes, *more]


@pytest.fixture(scope="module")
def finished(chat_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run that nothing disturbs leaves."""
    out = tmp_path_factory.mktemp("finished")
    assert run(arguments(chat_folder, out)) == 0
    return out


def hashes(out: Path) -> dict[str, str]:
    return {
        str(path.relative_to(out)): hash_file(path)
        for path in sorted(out.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


KILL_AT: dict[str, Callable[[Path], bool]] = {
    "data": lambda out: (out / "data" / "unit-00001.safetensors").exists(),
    "fit": lambda out: (out / "data" / "text.json").exists(),
    "measure": lambda out: (out / "table" / "fit.json").exists(),
}


def test_killed_in_each_stage_it_ends_with_the_same_files(finished: Path, chat_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sakiyomi", *arguments(chat_folder, tmp_path)]
    for is_time in KILL_AT.values():
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ)
        while process.poll() is None and not is_time(tmp_path):
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert run(arguments(chat_folder, tmp_path)) == 0
    assert hashes(tmp_path) == hashes(finished)


def test_a_finished_run_does_nothing_again(
    finished: Path, chat_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("unit-*")}
    started = time.perf_counter()
    assert run(arguments(chat_folder, finished, "--json")) == 0
    assert time.perf_counter() - started < 5
    told = json.loads(capsys.readouterr().out)
    assert told["drafter"] == str(finished / "table.safetensors")
    assert {one["length"] for one in told["measured"]} == {1, 3}
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("unit-*")} == before


def test_the_drafter_can_be_used(finished: Path, chat_target: LoadedModel) -> None:
    path = finished / "table.safetensors"
    assert make_drafter(f"table:path={path}", chat_target, ModelOptions())
    stored = read_drafter(path)
    assert stored.recipe is not None
    assert stored.recipe["data"]["num_tokens"] == 4000
    assert stored.measured is not None
    assert stored.measured["results"]


def test_stages_alone_need_the_ones_before(chat_target: LoadedModel, tmp_path: Path) -> None:
    recipe = read_recipe("table", settings=[*SETTINGS, "capture.taps=[1.0]"])
    pipeline = Pipeline(chat_target, recipe, tmp_path)
    with pytest.raises(ParameterError, match="run the stage data first"):
        pipeline.run(["fit"])
    pipeline.run(["data"])
    with pytest.raises(ParameterError, match="run the stage capture first"):
        pipeline.run(["fit"])
    pipeline.run(["capture"])
    with pytest.raises(ParameterError, match="run the stage fit first"):
        pipeline.run(["export"])
    pipeline.run(["fit"])
    assert pipeline.run(["export"]).path == tmp_path / "table.safetensors"
    with pytest.raises(ParameterError, match="known are data, capture"):
        pipeline.run(["train"])


def test_what_is_held_out_is_not_fitted(finished: Path, chat_target: LoadedModel) -> None:
    recipe = read_recipe("table", settings=SETTINGS)
    corpus = load_corpus(finished / "data")
    held_out = recipe.measure.held_out(len(corpus))
    mine = Pipeline(chat_target, recipe, finished)._split(corpus)
    assert len(held_out) >= 3
    assert len(mine) == len(corpus) - len(held_out)
    theirs = {corpus.tokens_of(i).tobytes() for i in held_out}
    assert not theirs & {mine.tokens_of(i).tobytes() for i in range(len(mine))}


def test_measured_is_what_the_loop_accepts(chat_target: LoadedModel, finished: Path) -> None:
    """The target as its own drafter is always right: K of K at each step but the last."""
    config = MeasureConfig(prompts=2, max_tokens=12, lengths=(1, 3), verifiers=("match",), baseline="")
    corpus = load_corpus(finished / "data")
    prompts = choose_prompts(corpus, [0, 1], 2)
    assert [prompt.ids for prompt in prompts] == [
        corpus.tokens_of(i)[: corpus.spans[corpus.spans[:, 0] == i][0, 1]].tolist() for i in (0, 1)
    ]
    for one in measure_drafter(chat_target, "model", {"model": str(chat_target.path)}, prompts, config):
        assert one.mean_acceptance_length > 0.6 * (one.length + 1)
        assert one.low <= one.mean_acceptance_length <= one.high
        assert all(share == pytest.approx(1, abs=0.35) for share in one.conditional)
    with pytest.raises(ParameterError, match="suffix drafted nothing"):
        measure_drafter(chat_target, "suffix", {"min_match": 1000}, prompts, config)
    with pytest.raises(ParameterError, match="nothing to measure on"):
        measure_drafter(chat_target, "none", {}, [], config)


@pytest.mark.parametrize("drafter", list_recipes())
def test_the_packages_recipes_are_whole(drafter: str) -> None:
    recipe = read_recipe(drafter)
    assert recipe.drafter == drafter
    if drafter == "table":
        assert callable(recipe.load_fit())


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["data.num_token=3"], "num_tokens"),
        (["speed.x=3"], "section.key=value"),
        (["data.num_tokens"], "section.key=value"),
        (["data.batch=0"], "batch=0"),
        (["measure.documents=none"], "documents"),
        (["capture.taps=[1.5]"], "shares of the depth"),
    ],
)
def test_a_wrong_setting_is_named(settings: list[str], told: str) -> None:
    with pytest.raises(ParameterError, match=told):
        read_recipe("table", settings=settings)


def test_recipes_of_the_users_own(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text("[fit]\norder = 3\n[data]\nbatch = 7\n")
    recipe = read_recipe("table", path, ["data.batch=9"])
    assert (recipe.fit["order"], recipe.fit["max_mb"], recipe.data.batch) == (3, 4.0, 9)
    path.write_text("[fit\n")
    with pytest.raises(ParameterError, match="no valid TOML"):
        read_recipe("table", path)
    path.write_text("what = 3\n")
    with pytest.raises(ParameterError, match="no key 'what'"):
        read_recipe("table", path)
    with pytest.raises(ParameterError, match="did you mean 'table'"):
        read_recipe("tabel")
    path.write_text('fit_with = "sakiyomi.nowhere:fit"\n')
    with pytest.raises(ParameterError, match="names no function"):
        read_recipe("table", path).load_fit()


# ---------------------------------------------------------------------------------------------- trained heads


HEAD_SETTINGS = [
    *("fit.passes=1", "fit.rows_per_step=100", "fit.head_dim=16", "fit.inner_size=32", "fit.num_layers=1"),
    *("fit.vocabulary=128", "fit.num_frequent=32", "fit.num_random=32", "fit.evaluations=1"),
    *('export.format="speculators"', "export.target=some/model", "measure.temperatures=[0.0]"),
]


def test_a_head_is_killed_goes_on_and_is_exported_for_vllm(
    finished: Path, chat_folder: Path, chat_target: LoadedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    found = []
    for number in range(2):
        out = tmp_path / str(number)
        shutil.copytree(finished / "data", out / "data")
        changes = [part for setting in HEAD_SETTINGS for part in ("--set", setting)]
        command = [*arguments(chat_folder, out, *changes, "--json")]
        command[1] = "eagle3"
        if number:
            killed = subprocess.Popen(
                [sys.executable, "-m", "sakiyomi", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            while killed.poll() is None and not (out / "eagle3" / "fit.safetensors").exists():
                time.sleep(0.005)
            killed.send_signal(signal.SIGKILL)
            killed.wait()
            assert not (out / "eagle3.safetensors").exists()
        assert run(command) == 0
        found.append(hashes(out / "eagle3-speculators") | {"own": hash_file(out / "eagle3" / "drafter.safetensors")})
    assert found[0] == found[1]
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["folder"] == str(tmp_path / "1" / "eagle3-speculators")
    own, served = read_drafter(Path(told["drafter"])), read_drafter_at(Path(told["folder"]))
    assert served.taps == own.taps == (1, 2)
    assert (served.config["norm_output"], served.config["norm_before_residual"], served.config["fc_norm"]) == (
        True,
    ) * 3
    assert np.array_equal(served.vocabulary, own.vocabulary)
    drafts = []
    for path in (told["drafter"], told["folder"]):
        sequence = Sequence("s", list(b"<user>abc"), 9, SamplingParams(temperature=0), 0, chat_target.model.new_cache())
        drafter = make_drafter(f"eagle3:path={path}", chat_target, ModelOptions())
        prefill(chat_target.model, drafter, sequence)
        drafts.append(drafter.propose([sequence], [3])[0].tokens)
    assert len(drafts[0]) == 3
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize(
    ("drafter", "setting", "told"),
    [("table", "export.format=speculators", "no room for the drafter table"), ("eagle3", "export.format=onnx", "onnx")],
)
def test_what_cannot_be_exported_is_refused_first(
    drafter: str, setting: str, told: str, chat_target: LoadedModel, tmp_path: Path
) -> None:
    with pytest.raises(ParameterError, match=told):
        Pipeline(chat_target, read_recipe(drafter, settings=[setting]), tmp_path).run()
    assert not (tmp_path / "data").exists()
