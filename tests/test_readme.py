"""Every command of the README runs, and its Python does what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SCRIPTS = Path(sys.executable).parent

RUN_ELSEWHERE = {
    "git clone": "needs the published repository",
    "make test": "is what runs this test",
    "make check": "is the gate beside this test",
    "pip install": "tests/test_packaging.py builds and installs the package",
}
QUICK = {
    "sakiyomi prove": "--temperature 1 --tokens 8",
    "sakiyomi bench": "--per-group 1 --group qa --tokens 4 --rounds 1",
}
"""What is added to a command that takes minutes."""


def find_commands() -> list[str]:
    """Lines of the shell blocks, and commands in running text."""
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    inline = re.findall(r"`((?:make|sakiyomi|pip|python) [^`]+)`", re.sub(r"```.*?```", "", README, flags=re.DOTALL))
    lines = [line for block in blocks for line in block.splitlines() if line.strip()]
    return list(dict.fromkeys([*lines, *inline]))


def split_chain(line: str) -> list[str]:
    return [part.strip() for part in line.split("&&") if not part.strip().startswith("cd ")]


COMMANDS = [
    command
    for line in find_commands()
    for command in split_chain(line)
    if not command.startswith(tuple(RUN_ELSEWHERE)) and "..." not in command
]


def test_there_are_commands() -> None:
    assert "make demo" in COMMANDS
    assert sum("sakiyomi generate" in command for command in COMMANDS) >= 3


@pytest.fixture
def environment(model_path: Path, tmp_path: Path) -> dict[str, str]:
    """The default model lies in a cache of its own, so that nothing is fetched."""
    from sakiyomi.hub import DEFAULT_MODEL, KNOWN_MODELS

    if not (SCRIPTS / "sakiyomi").exists():
        pytest.skip("the command sakiyomi is not installed beside this interpreter: run `make test`")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / KNOWN_MODELS[DEFAULT_MODEL].file_name).symlink_to(model_path.resolve())
    path = os.pathsep.join([str(SCRIPTS), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "SAKIYOMI_CACHE": str(tmp_path)}


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str, environment: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest) -> None:
    command = command.replace("proof.html", str(tmp_path / "proof.html"))
    if "question.jsonl" in command:
        command = command.replace("question.jsonl", str(request.getfixturevalue("spec_bench_path")))
    for script, options in QUICK.items():
        command += f" {options}" if script in command else ""
    if command.startswith("make") and not (ROOT / ".venv").exists():
        pytest.skip("make would first build an environment: run `make test`")
    is_talk = command == "sakiyomi chat"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env=environment,
        input="Say hello.\n/exit\n" if is_talk else "",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()


def test_python_block(model_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(block.replace('"smollm2"', repr(str(model_path))), "README.md", "exec"), {})
    lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) >= 2
    assert all(float(line.split()[-1]) >= 1 for line in (lines[-1],))
