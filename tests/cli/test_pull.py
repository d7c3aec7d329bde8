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


def test_clean_names_what_it_removes(run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SAKIYOMI_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "pull", None)
    result = run("pull", "--clean")
    assert (result.code, result.stdout, result.stderr) == (0, "", "files removed: 0, 0 MB\n")
    (tmp_path / "packed").mkdir()
    stale = tmp_path / "packed" / "gone-int8-0123456789abcdef.bin"
    stale.write_bytes(bytes(2_000_000))
    result = run("pull", "--clean")
    assert (result.code, result.stdout, result.stderr) == (0, f"{stale}\n", "files removed: 1, 2 MB\n")
    assert not stale.exists()
