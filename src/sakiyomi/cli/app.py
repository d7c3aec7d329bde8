"""The commands in one typer application, and what becomes of their errors."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer

from sakiyomi.cli import INTERRUPTED, bench, chat, demo, doctor, generate, prove, pull, train, tune
from sakiyomi.cli.show import join_lines, print_error
from sakiyomi.errors import SakiyomiError

FAILED, MISUSED = 1, 2
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""Why stdout takes nothing; errors of files carry the file's name, and those of stdout do not."""

# What typer raises on a wrong command line. Its base class has no public name, and lies in click or in typer itself
# depending on the version of typer; ClickException > UsageError > BadParameter holds in both.
UsageError: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="sakiyomi",
    help="Speculative decoding: the same tokens, several at a time.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("pull")(pull.pull)
app.command("demo")(demo.demo)
app.command("bench")(bench.bench)
app.command("prove")(prove.prove)
app.command("doctor")(doctor.doctor)
app.command("train")(train.train)
app.command("tune")(tune.tune)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; every error ends as one line on stderr."""
    debug = "--debug" in arguments  # read here too, since an option's own value is lost with the error
    _survive_odd_streams()
    if sys.stdout is None:
        print_error("standard output is closed, so there is nowhere to write to; open it or drop `>&-`.")
        return FAILED
    try:
        result = typer.main.get_command(app).main(list(arguments), prog_name="sakiyomi", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except UsageError as error:
        return _fail(error, debug, MISUSED, _describe_misuse(error))
    except SakiyomiError as error:
        return _fail(error, debug, FAILED, str(error))
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return FAILED
    except OSError as error:
        if error.filename is not None or error.errno not in UNWRITABLE:
            return _fail_unforeseen(error, debug)
        _drop_stdout()
        reason = error.strerror or str(error)
        return _fail(error, debug, FAILED, f"cannot write to standard output ({reason}); give it a place with room.")
    except Exception as error:
        return _fail_unforeseen(error, debug)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if show_version:
        typer.echo(f"sakiyomi {_version()}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _version() -> str:
    try:
        return version("sakiyomi")
    except PackageNotFoundError:
        return "(run from its sources, not installed)"


def _describe_misuse(error: Any) -> str:
    """typer's complaint, the names it knows where one was wrong, and where to read on."""
    told = join_lines(error.format_message()).rstrip(".")
    context = getattr(error, "ctx", None)
    if context is None:
        return f"{told}. Try `sakiyomi --help`."
    known = ""
    if hasattr(error, "option_name"):
        options = [max(option.opts, key=len) for option in context.command.get_params(context) if option.opts]
        known = f" Known options: {', '.join(name for name in options if name.startswith('-'))}."
    elif hasattr(context.command, "list_commands"):
        known = f" Known commands: {', '.join(context.command.list_commands(context))}."
    mark = "" if told.endswith("?") else "."
    return f"{told}{mark}{known} Try `{context.command_path} --help`."


def _fail(error: BaseException, debug: bool, code: int, line: str) -> int:
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    print_error(line)
    return code


def _fail_unforeseen(error: Exception, debug: bool) -> int:
    told = join_lines(str(error)) or "no further word"
    return _fail(error, debug, FAILED, f"{type(error).__name__}: {told} (--debug shows where).")


def _survive_odd_streams() -> None:
    """Show what the terminal's encoding lacks as "?", rather than fail in the middle of an answer."""
    if sys.stderr is None:  # closed; print would take None for stdout
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def _drop_stdout() -> None:
    """Point stdout to nowhere: the reader has gone, and Python would complain once more when it exits."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        return
