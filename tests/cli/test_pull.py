"""`sakiyomi pull`: the path on stdout, everything else on stderr."""

from __future__ import annotations

from pathlib import Path

import pytest

from sakiyomi import hub
from sakiyomi.errors import DownloadError


def test_path_on_stdout(run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def pull(name: str, *, progress: hub.Progress) -> Path:
        for done in range(0, 101, 50):
            progress("fetching model.gguf", done, 100)
        return tmp_path / f"{name}.gguf"

    monkeypatch.setattr(hub, "pull", pull)
    result = run("pull", "smollm2")
    assert (result.code, result.stdout) == (0, f"{tmp_path / 'smollm2.gguf'}\n")
    assert result.stderr == "fetching model.gguf\n"


def test_failure_is_one_line(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def pull(name: str, *, progress: hub.Progress) -> Path:
        progress("fetching model.gguf", 50, 100)
        raise DownloadError("no network; connect it.")

    monkeypatch.setattr(hub, "pull", pull)
    result = run("pull")
    assert (result.code, result.stdout) == (1, "")
    assert result.stderr == "fetching model.gguf\nerror: no network; connect it.\n"


def test_an_unknown_name(run) -> None:
    result = run("pull", "smolm2")
    assert (result.code, result.stdout) == (1, "")
    assert "smollm2" in result.stderr
