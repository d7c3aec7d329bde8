"""The command line as a program: exit codes, streams, signals, a terminal."""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

FAKE_PROGRAM = str(Path(__file__).with_name("fake_llm.py"))
TEXT = "The sky is blue\U0001f600\nDone."


def run_program(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, **options)


def fake_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fake_llm", FAKE_PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def without_colour_wishes() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}


REAL = ("-c", "from sakiyomi.cli import main; main()")


def test_version_and_help() -> None:
    assert run_program(*REAL, "--version").stdout.startswith("sakiyomi ")
    for arguments in ((), ("--help",), ("-h",)):
        shown = run_program(*REAL, *arguments)
        assert shown.returncode == 0, shown.stderr
        for command in ("generate", "chat", "pull", "demo"):
            assert command in shown.stdout


def test_help_needs_neither_numpy_nor_torch() -> None:
    script = """if True:
        import sys
        from sakiyomi.cli.app import run
        assert run(["generate", "--help"]) == 0
        loaded = {"numpy", "torch", "tokenizers", "gguf", "jinja2", "sakiyomi.llm"} & set(sys.modules)
        assert not loaded, loaded
    """
    shown = run_program("-c", script)
    assert shown.returncode == 0, shown.stderr


def test_help_names_every_option() -> None:
    shown = run_program(*REAL, "generate", "--help", env=os.environ | {"COLUMNS": "200", "NO_COLOR": "1"}).stdout
    options = set(re.findall(r"--[a-z-]+", shown))
    assert options >= {
        *(
            "--model",
            "--drafter",
            "--verifier",
            "--dtype",
            "--device",
            "--backend",
            "--threads",
            "--max-model-len",
            "--file",
        ),
        *("--max-tokens", "--temperature", "--top-p", "--top-k", "--min-p", "--seed", "--stop", "--min-tokens"),
        *("--presence-penalty", "--frequency-penalty", "--repetition-penalty", "--ignore-eos"),
        *("--system", "--raw", "--json", "--debug"),
    }


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("generate", "hi", "-m", "no-such-model"), 1, "unknown model 'no-such-model'"),
        (("generate", "hi", "-m", "missing.gguf"), 1, "no file or folder missing.gguf"),
        (("generate", "hi", "--wrong"), 2, "--wrong"),
    ],
)
def test_errors_of_the_real_program(arguments: tuple[str, ...], code: int, told: str) -> None:
    shown = run_program(*REAL, *arguments)
    assert (shown.returncode, shown.stdout) == (code, "")
    assert told in shown.stderr
    assert shown.stderr.count("\n") == 1


def test_a_pipe_gets_plain_text() -> None:
    shown = run_program(FAKE_PROGRAM, "generate", "-", input="hi", env=without_colour_wishes())
    assert shown.stdout == TEXT + "\n"


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"{sys.executable} {FAKE_PROGRAM} generate hi | head -c 3"
    shown = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert shown.stdout == "The"
    assert shown.stderr == ""


def test_an_encoding_without_the_character() -> None:
    shown = run_program(FAKE_PROGRAM, "generate", "hi", env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert shown.returncode == 0
    assert shown.stdout == TEXT.replace("\U0001f600", "?") + "\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-16", "utf-8"])
def test_json_loses_nothing_in_any_encoding(encoding: str) -> None:
    for prompt, answer in (("hi", TEXT), ("steer", "".join(fake_module().STEERING))):
        shown = subprocess.run(
            [sys.executable, FAKE_PROGRAM, "generate", prompt, "--json"],
            capture_output=True,
            env=os.environ | {"PYTHONIOENCODING": encoding},
            timeout=60,
        )
        assert shown.returncode == 0, shown.stderr
        text = shown.stdout.decode(encoding)
        assert json.loads(text)["text"] == answer
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", text), "a control character is written as it is"


# ---------------------------------------------------------------------------------------------- broken streams


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("generate <&-", "there is no prompt"),
        ("generate - <&-", "standard input is closed"),
        ("chat <&-", "standard input is closed"),
        ("generate hi >&-", "standard output is closed"),
        ("generate hi --json >&-", "standard output is closed"),
        ("--help >&-", "standard output is closed"),
        ("chat >&-", "standard output is closed"),
        ("demo hi >&-", "standard output is closed"),
        ("generate hi >/dev/full", "cannot write to standard output (No space left on device)"),
        ("generate hi --json >/dev/full", "cannot write to standard output (No space left on device)"),
        ("--help >/dev/full", "cannot write to standard output (No space left on device)"),
        ("chat >/dev/full", "cannot write to standard output (No space left on device)"),
        ("demo hi >/dev/full", "cannot write to standard output (No space left on device)"),
    ],
)
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_closed_or_full_stream_is_one_line(command: str, told: str) -> None:
    line = f"echo hi | {sys.executable} {FAKE_PROGRAM} {command}"
    shown = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60)
    assert shown.returncode in (1, 2)
    assert shown.stdout == ""
    (error,) = (text for text in shown.stderr.splitlines() if "tokens/s" not in text)
    assert error.startswith("error: ")
    assert told in error


@pytest.mark.parametrize("where", ["2>&-", "2>/dev/full"])
def test_without_stderr_the_answer_comes_all_the_same(where: str) -> None:
    for command, code, stdout in (("generate hi", 0, TEXT + "\n"), ("generate", 1, "")):
        line = f"{sys.executable} {FAKE_PROGRAM} {command} </dev/null {where}"
        shown = subprocess.run(line, shell=True, stdout=subprocess.PIPE, text=True, timeout=60)
        assert (shown.returncode, shown.stdout) == (code, stdout)


# ---------------------------------------------------------------------------------------------- interruptions


def test_ctrl_c_while_the_program_is_imported() -> None:
    """At every stage: modules take turns to be the one whose import is interrupted."""
    script = """if True:
        import builtins, os, signal, sys
        number, wanted, importing = 0, int(sys.argv.pop(1)), builtins.__import__
        from sakiyomi.cli import main

        def interrupting(*arguments, **more):
            global number
            number += 1
            if number == wanted:
                os.kill(os.getpid(), signal.SIGINT)
            return importing(*arguments, **more)

        builtins.__import__ = interrupting
        sys.argv[0] = "sakiyomi"
        main()
    """
    for stage in (1, 30, 300, 1000):
        shown = run_program("-c", script, str(stage), "generate", "--help")
        assert (shown.returncode, shown.stdout, shown.stderr) == (130, "", ""), stage


# ---------------------------------------------------------------------------------------------- in a terminal


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, master: int, process: subprocess.Popen[bytes]) -> None:
        self.master = master
        self.process = process
        self.shown = ""
        self.seen = 0

    def wait_for(self, text: str) -> None:
        """Read until `text` appears behind what was waited for before."""
        limit = time.monotonic() + 30
        while text not in self.shown[self.seen :]:
            assert time.monotonic() < limit, f"{text!r} never came; shown: {self.shown!r}"
            self._read(0.1)
        self.seen = self.shown.index(text, self.seen) + len(text)

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def interrupt(self) -> None:
        self.type("\x03")

    def finish(self) -> int:
        limit = time.monotonic() + 30
        while self.process.poll() is None:
            assert time.monotonic() < limit, f"the program never ended; shown: {self.shown!r}"
            self._read(0.05)
        self._read(0.05)
        return self.process.returncode

    def _read(self, seconds: float) -> None:
        while select.select([self.master], [], [], seconds)[0]:
            try:
                self.shown += os.read(self.master, 65536).decode(errors="replace")
            except OSError:  # Linux: the other side is closed
                return


@contextmanager
def open_terminal(*arguments: str, **environment: str) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, FAKE_PROGRAM, *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=without_colour_wishes() | {"TERM": "xterm-256color"} | environment,
        start_new_session=True,
        preexec_fn=_take_terminal,
    )
    os.close(slave)
    try:
        yield Terminal(master, process)
    finally:
        process.kill()
        process.wait()
        os.close(master)


def _take_terminal() -> None:
    """Make the pseudo-terminal the controlling one, so that Ctrl-C typed there becomes a signal."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_drafted_tokens_are_coloured_in_a_terminal() -> None:
    with open_terminal("generate", "hi") as terminal:
        assert terminal.finish() == 0
        assert "The sky\x1b[1;32m is\x1b[0m\x1b[1;32m blue\x1b[0m" in terminal.shown


def test_no_color_is_respected() -> None:
    with open_terminal("generate", "hi", NO_COLOR="1") as terminal:
        assert terminal.finish() == 0
        assert "The sky is blue" in terminal.shown
        assert "\x1b[1;32m" not in terminal.shown


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=["colour", "none", "dumb"])
@pytest.mark.parametrize("command", ["generate", "chat", "demo"])
def test_a_model_does_not_steer_the_terminal(command: str, environment: dict[str, str]) -> None:
    with open_terminal(command, *(() if command == "chat" else ("steer",)), **environment) as terminal:
        if command == "chat":
            terminal.wait_for("> ")
            terminal.type("steer\n")
            terminal.wait_for("tokens/s")
            terminal.type("\x04")
        assert terminal.finish() == 0, terminal.shown
    answers = re.findall(r"<.*?\t>", terminal.shown, re.DOTALL)
    assert len(answers) == (2 if command == "demo" else 1)
    for answer in answers:
        rest = re.sub(r"\x1b\[1;32m|\x1b\[0m|\t", "", answer)
        assert not re.search("[\x00-\x1f\x7f-\x9f]", rest)
        assert len(rest) == len("".join(fake_module().STEERING)) - 1, "a sign went missing"


def test_ctrl_c_ends_generate_quietly() -> None:
    with open_terminal("generate", "hi") as terminal:
        terminal.wait_for("The")
        terminal.interrupt()
        assert terminal.finish() == 130
        assert "Traceback" not in terminal.shown
        assert "Done." not in terminal.shown


def test_a_signal_ends_json_with_nothing_on_stdout() -> None:
    process = subprocess.Popen(
        [sys.executable, FAKE_PROGRAM, "generate", "hi", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stdout, stderr.strip()) == (130, b"", b"")  # older click ends the line


def test_ctrl_c_stops_the_answer_and_not_the_chat() -> None:
    with open_terminal("chat") as terminal:
        terminal.wait_for("> ")
        terminal.type("hello\n")
        terminal.wait_for("The")
        terminal.interrupt()
        terminal.wait_for("stopped")
        assert "Done." not in terminal.shown
        terminal.type("again\n")
        terminal.wait_for("Done.")
        terminal.wait_for("tokens/s")
        terminal.wait_for("> ")
        terminal.interrupt()  # at the prompt: a word of help, and on it goes
        terminal.wait_for("Ctrl-D leaves")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.finish() == 0
        assert "Traceback" not in terminal.shown


def test_no_prompt_in_a_terminal_is_a_usage_error() -> None:
    with open_terminal("generate") as terminal:
        assert terminal.finish() == 2
        assert "error: there is no prompt" in terminal.shown
