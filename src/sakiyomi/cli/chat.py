"""`sakiyomi chat`: a conversation of several turns."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Literal, TypeAlias

import typer

from sakiyomi.cli import loading
from sakiyomi.cli.options import (
    Debug,
    EngineOptions,
    MaxTokens,
    SamplingOptions,
    Speculation,
    System,
    expand_options,
    parse_speculation,
)
from sakiyomi.cli.show import print_error, print_note, print_stream, print_summary
from sakiyomi.errors import ParameterError, SakiyomiError

if TYPE_CHECKING:
    from sakiyomi.params import SamplingParams
    from sakiyomi.session import ChatSession

Outcome: TypeAlias = Literal["done", "failed", "over"]

HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


@expand_options
def chat(
    engine: EngineOptions,
    sampling: SamplingOptions,
    max_tokens: MaxTokens = None,
    system: System = None,
    speculation: Speculation = "on",
    debug: Debug = False,
) -> None:
    """Talk with the model; each turn computes only what is new.

    /reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer.
    """
    params = sampling.to_params(max_tokens=max_tokens)
    wish = parse_speculation(speculation)
    if sys.stdin is None:
        raise ParameterError("standard input is closed, so nothing can be said; open it or use `sakiyomi generate`.")
    llm = loading.load_llm(engine)
    if llm.chat_template is None:
        raise ParameterError(f"{llm.info.name} has no chat template; use `sakiyomi generate --raw` with it.")
    session = llm.session(system)
    is_typed = sys.stdin.isatty()
    if is_typed:
        print_note(HELP)
    outcomes: list[Outcome] = []
    try:
        while "over" not in outcomes[-1:]:
            outcomes.append(_take_turn(session, params, wish))
    except UnicodeDecodeError as error:
        raise ParameterError("standard input is not valid UTF-8; give a text in UTF-8.") from error
    if "failed" in outcomes and not is_typed:  # whoever typed has seen it; a script has not
        raise typer.Exit(1)


def _take_turn(session: ChatSession, params: SamplingParams, speculation: bool | int) -> Outcome:
    """Read what the user says and act on it."""
    said = HELP
    try:
        line = _read_line()
        if line in (None, "/exit", "/quit"):
            return "over"
        if line == "/reset":
            session.reset()
        elif line.startswith("/") and line[1:].isalpha():  # /help, or a command that is none
            print_note(HELP)
        elif line:
            said = "stopped"
            _answer(session, line, params, speculation)
    except KeyboardInterrupt:
        print(flush=True)
        print_note(said)
    except SakiyomiError as error:  # one turn that fails does not end the conversation
        print_error(str(error))
        return "failed"
    return "done"


def _read_line() -> str | None:
    """The next thing that the user says; None at the end of the input."""
    try:
        return input("> " if sys.stdin.isatty() else "").removeprefix("\ufeff").strip()
    except EOFError:
        return None


def _answer(session: ChatSession, line: str, params: SamplingParams, speculation: bool | int) -> None:
    stream = session.stream(line, params, speculation=speculation)
    try:
        output = print_stream(stream)
    finally:
        close = getattr(stream, "close", None)
        if close is not None:
            close()
    print(flush=True)
    print_summary(output, temperature=params.temperature)
