"""What the pages in docs/ show can be done: their code runs, and the drafter that they write is installed and used."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sakiyomi import LLM, SamplingParams
from sakiyomi.errors import ParameterError, UnknownNameError
from sakiyomi.plugins import list_names

GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
DOCS = Path(__file__).parents[1] / "docs"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL)


def test_the_drafter_of_the_page_is_installed_and_used(
    write_llama: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if importlib.util.find_spec("setuptools") is None or importlib.util.find_spec("pip") is None:
        pytest.skip("pip or setuptools is not installed beside this interpreter")
    source, site = tmp_path / "sakiyomi-followers", tmp_path / "site"
    source.mkdir()
    (project,) = blocks("write-a-drafter.md", "toml")
    module, check = blocks("write-a-drafter.md", "python")
    (source / "pyproject.toml").write_text(project, encoding="utf-8")
    (source / "sakiyomi_followers.py").write_text(module, encoding="utf-8")
    pip = (sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    done = subprocess.run([*pip, "--target", site, source], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    folder = str(write_llama(tmp_path / "model"))
    with pytest.raises(UnknownNameError, match="followers"):
        LLM(folder, drafter="followers")
    monkeypatch.syspath_prepend(str(site))
    assert "followers" in list_names("sakiyomi.drafters", "sakiyomi.drafters")
    exec(compile(check, "write-a-drafter.md", "exec"), {"model": folder})
    assert float(capsys.readouterr().out) >= 1
    (result,) = LLM(folder, drafter="followers:num_speculative_tokens=6").generate("abcabc", GREEDY)
    assert result.speculation.drafter == "sakiyomi_followers"
    assert result.speculation.num_draft_tokens > 6
    with pytest.raises(ParameterError, match="num_speculative_tokens"):
        LLM(folder, drafter="followers:depth=3")
    with pytest.raises(ParameterError, match="1 to 64"):
        LLM(folder, drafter="followers:num_speculative_tokens=0")


def test_the_example_of_the_page_on_transformers_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    example = blocks("transformers.md", "python")[0]
    exec(compile(example, "transformers.md", "exec"), {})
    assert re.fullmatch(r"[\d.]+ tokens per step", capsys.readouterr().out.strip())


def test_the_example_of_the_page_on_checkpoints_writes_a_folder(
    write_llama: Callable[..., Path], tmp_path: Path
) -> None:
    from heads import eagle3_parts, write_head
    from sakiyomi.assemble import read_drafter_at

    model, drafter = write_llama(tmp_path / "model"), write_head(tmp_path / "head", *eagle3_parts())
    (example,) = blocks("checkpoints.md", "python")
    names = {"model": str(model), "drafter": str(drafter), "folder": str(tmp_path / "written")}
    exec(compile(example, "checkpoints.md", "exec"), names)
    written = read_drafter_at(tmp_path / "written")
    assert written.tensors["embed_tokens.weight"].shape == (257, 64)
    assert list(written.vocabulary) == list(read_drafter_at(drafter).vocabulary)
