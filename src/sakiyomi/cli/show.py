"""What a person sees: the streamed answer with its drafted tokens in colour, and the line below it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.style import Style

    from sakiyomi.results import RequestOutput, StreamPiece

DRAFT_STYLE = "bold green"
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that act on a terminal, but for line ends and tabs."""


def print_stream(pieces: Iterable[StreamPiece]) -> RequestOutput:
    """Write an answer to stdout as it comes; in a terminal, tokens that a drafter guessed are in colour."""
    style = _draft_style()
    is_shown = sys.stdout.isatty() or style is not None
    output = None
    for piece in pieces:
        if piece.text:
            text = disarm(piece.text) if is_shown else piece.text
            sys.stdout.write(style.render(text) if style is not None and piece.source == "draft" else text)
            sys.stdout.flush()
        output = piece.output or output
    assert output is not None, "the last piece of a stream carries its output"
    return output


def print_summary(output: RequestOutput, *, temperature: float) -> None:
    """One line on stderr: how many tokens, how fast, how well the drafts went, and the seed if it mattered."""
    print_note(describe(output, temperature=temperature))


def describe(output: RequestOutput, *, temperature: float) -> str:
    """The text of `print_summary`."""
    completion, stats = output.outputs[0], output.speculation
    parts = [
        _count(len(completion.token_ids), "token"),
        f"{output.timing.tokens_per_s:.1f} tokens/s",
        f"{stats.mean_acceptance_length:.2f} tokens per step",
        f"{stats.drafter}: {stats.num_accepted_tokens} of {_count(stats.num_draft_tokens, 'drafted token')} accepted",
    ]
    if completion.finish_reason == "length":
        parts.append("cut by length")
    if temperature > 0:
        parts.append(f"seed {output.seed}")
    return " · ".join(parts)


def print_error(text: str) -> None:
    """One line on stderr, whatever the message looks like."""
    with suppress(OSError):  # nobody can be told that stderr is full
        print(f"error: {disarm(join_lines(text))}", file=sys.stderr, flush=True)


def print_note(text: str) -> None:
    """A word to the person at the terminal, on stderr."""
    with suppress(OSError):
        error_console().print(disarm(text), style="dim", highlight=False, markup=False, soft_wrap=True)


def disarm(text: str) -> str:
    """`text` with visible signs in place of control characters, so that it cannot steer a terminal."""
    return CONTROLS.sub(lambda found: _picture(ord(found[0])), text)


def _picture(code: int) -> str:
    """Unicode's picture of a control character; the replacement character where it has none."""
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else "\ufffd"


def join_lines(text: str) -> str:
    """`text` on one line."""
    return " ".join(text.split())


def error_console() -> Console:
    """Where everything goes that is not the result."""
    from rich.console import Console

    return Console(stderr=True)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _draft_style() -> Style | None:
    """The colour of drafted tokens, or None where stdout is no terminal or wants no colour."""
    from rich.console import Console
    from rich.style import Style

    console = Console()
    plain = not console.is_terminal or console.no_color or console.is_dumb_terminal or console.legacy_windows
    return None if plain else Style.parse(DRAFT_STYLE)
