"""The command line in this process over a scripted model, and as a program of its own."""

from __future__ import annotations

import importlib.util
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sakiyomi.cli import app, loading

FAKE_PROGRAM = Path(__file__).with_name("fake_llm.py")


@dataclass(frozen=True)
class Result:
    code: int
    stdout: str
    stderr: str


@pytest.fixture(scope="session")
def fake_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fake_llm", FAKE_PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def llm(fake_module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The scripted model that commands get; `llm.options` is what the command asked for."""
    fake = fake_module.FakeLLM()

    def load(options: Any) -> Any:
        fake.options = options
        return fake_module.load_fake(options, fake)

    monkeypatch.setattr(loading, "load_llm", load)
    monkeypatch.setattr(loading, "share_plainly", lambda llm: llm)
    return fake


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run a command line in this process, with `stdin` piped into it."""

    def call(*arguments: str, stdin: bytes = b"") -> Result:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        capsys.readouterr()
        code = app.run(arguments)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call
