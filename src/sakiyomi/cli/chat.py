"""`sakiyomi chat`: a conversation of several turns."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from sakiyomi.cli import loading
from sakiyomi.cli.options import Debug, EngineOptions, MaxTokens, SamplingOptions, System, expand_options
from sakiyomi.cli.show import error_console, print_stream, print_summary
from sakiyomi.errors import ParameterError, SakiyomiError

if TYPE_CHECKING:
    from sakiyomi.llm import ChatSession
    from sakiyomi.params import SamplingParams

HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


@expand_options
def chat(
    engine: EngineOptions,
    sampling: SamplingOptions,
    max_tokens: MaxTokens = None,
    system: System = None,
    debug: Debug = False,
) -> None:
    """Talk with the model; each turn computes only what is new.

    /reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer.
    """
    params = sampling.to_params(max_tokens=max_tokens)
    llm = loading.load_llm(engine)
    if llm.chat_template is None:
        raise ParameterError(f"{llm.info.name} has no chat template; use `sakiyomi generate --raw` with it.")
    session = llm.session(system)
    if sys.stdin.isatty():
        _note(HELP)
    while (line := _read_line()) is not None:
        if line in ("/exit", "/quit"):
            return
        if line:
            _take_turn(session, line, params)


def _read_line() -> str | None:
    """The next thing that the user says; None at the end of the input."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "").strip()
        except KeyboardInterrupt:
            print()
            _note(HELP)
        except EOFError:
            return None
        except UnicodeDecodeError:
            raise ParameterError("standard input is not valid UTF-8; give a text in UTF-8.") from None


def _take_turn(session: ChatSession, line: str, params: SamplingParams) -> None:
    try:
        if line == "/reset":
            session.reset()
        elif line.startswith("/") and line[1:].isalpha():  # /help, or a command that is none
            _note(HELP)
        else:
            _answer(session, line, params)
    except KeyboardInterrupt:
        print()
        _note("stopped")
    except SakiyomiError as error:  # one turn that fails does not end the conversation
        error_console().print(f"error: {error}", highlight=False, markup=False, soft_wrap=True)


def _answer(session: ChatSession, line: str, params: SamplingParams) -> None:
    stream = session.stream(line, params)
    try:
        output = print_stream(stream)
    finally:
        close = getattr(stream, "close", None)
        if close is not None:
            close()
    print()
    print_summary(output, temperature=params.temperature)


def _note(text: str) -> None:
    error_console().print(text, style="dim", highlight=False, markup=False, soft_wrap=True)
