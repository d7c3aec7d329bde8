"""`sakiyomi bench`: drafters beside plain decoding, on prompts of several kinds."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sakiyomi.cli import loading
from sakiyomi.cli.options import Debug, LoadOptions, expand_options
from sakiyomi.cli.show import error_console
from sakiyomi.errors import ParameterError

if TYPE_CHECKING:
    from sakiyomi.bench.run import Result, Row
    from sakiyomi.measure import Report


@expand_options
def bench(
    engine: LoadOptions,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="Prompts in Spec-Bench's format; by default 24 of ours.")
    ] = None,
    drafters: Annotated[
        list[str] | None, typer.Option("--drafter", "-d", help="Measure this drafter; repeat. By default suffix.")
    ] = None,
    verifiers: Annotated[
        list[str] | None, typer.Option("--verifier", help="Measure with this rule; repeat. By default match.")
    ] = None,
    temperatures: Annotated[
        list[float] | None,
        typer.Option("--temperature", "-t", help="Measure at this temperature; repeat."),
    ] = None,
    groups: Annotated[
        list[str] | None, typer.Option("--group", "-g", help="Only this group of prompts; repeat.")
    ] = None,
    per_group: Annotated[int | None, typer.Option("--per-group", min=1, help="Prompts of each group at most.")] = None,
    num_tokens: Annotated[int, typer.Option("--tokens", help="Tokens of an answer at most.")] = 128,
    num_rounds: Annotated[int, typer.Option("--rounds", help="How often each prompt is answered.")] = 3,
    seed: Annotated[int, typer.Option("--seed", help="Seed at temperatures above 0.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    debug: Debug = False,
) -> None:
    """Measure how much faster each drafter makes decoding, on which kind of prompt.

    All ways of answering take turns on every prompt, so that each meets the same noise of the machine. Speeds are
    medians, their ratio to plain decoding has the bounds of a 95 % bootstrap.
    """
    from sakiyomi.bench.prompts import read_prompts
    from sakiyomi.bench.run import Settings, run_benchmark

    texts = read_prompts(prompts, per_group, groups)
    settings = Settings(
        drafters=tuple(drafters or ["suffix"]),
        verifiers=tuple(verifiers or ["match"]),
        temperatures=tuple(temperatures or [0.0]),
        num_tokens=num_tokens,
        num_rounds=num_rounds,
        seed=seed,
    )
    loaded = loading.load_for_bench(engine, settings.drafters, settings.verifiers)
    with _progress() as report:
        result = run_benchmark(
            loaded,
            loading.model_options(engine),
            texts,
            settings,
            provenance={"command": shlex.join(["sakiyomi", *sys.argv[1:]])},
            report=report,
        )
    if as_json:
        print(json.dumps(result.to_json(), ensure_ascii=False))
    else:
        _print(result)


@contextmanager
def _progress() -> Iterator[Report]:
    """A bar of all answers on stderr, where that is a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = error_console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("starting", total=None)

        def report(what: str, done: int, total: int) -> None:
            bars.update(task, description=what, completed=done, total=total)

        yield report


# ---------------------------------------------------------------------------------------------- the table

HEAD = (
    "group",
    "t",
    "drafter",
    "rule",
    "tokens/s",
    "speed-up",
    "95 %",
    "per step",
    "by position",
    "if tried",
    "draft",
    "same",
)
MAX_POSITIONS = 4


def _print(result: Result) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    table = Table(*HEAD, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in table.columns:
        column.no_wrap = True
    group = None
    for row in result.rows:
        if group is not None and row.group != group:
            table.add_section()
        group = row.group
        table.add_row(*(Text(cell) for cell in _cells(row)), style="bold" if row.group == "all" else "")
    console.print(table)
    for name, value in result.provenance.items():
        console.print(Text(f"{name}: {value}", style="dim"))


def _cells(row: Row) -> list[str]:
    drafter = row.drafter if row.engine == "sakiyomi" else f"{row.engine}: {row.drafter}"
    length = "" if row.mean_acceptance_length is None else f"{row.mean_acceptance_length:.2f}"
    share = "" if row.draft_share is None else f"{100 * row.draft_share:.1f} %"
    same = "yes" if row.is_identical else "no" if row.keeps == "tokens" else f"no ({row.keeps})"
    return [
        row.group,
        f"{row.temperature:g}",
        drafter,
        row.verifier,
        f"{row.tokens_per_s:.1f}",
        f"{row.speedup.value:.2f}",
        f"{row.speedup.low:.2f}-{row.speedup.high:.2f}",
        length,
        _positions(row.acceptance_per_position),
        _positions(row.conditional_acceptance),
        share,
        same,
    ]


def _positions(shares: tuple[float, ...]) -> str:
    """The first positions in hundredths: ".38 .21"."""
    return " ".join(f"{share:.2f}".removeprefix("0") for share in shares[:MAX_POSITIONS])


def refuse_unwritable(path: Path | None) -> None:
    """Raise before an hour of measuring, not behind it."""
    if path is not None and not path.absolute().parent.is_dir():
        raise ParameterError(f"cannot write {path}: its folder does not exist; make it first.")
