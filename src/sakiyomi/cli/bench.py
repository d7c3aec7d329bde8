"""`sakiyomi bench`: drafters beside plain decoding, on prompts of several kinds."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sakiyomi.cli import loading
from sakiyomi.cli.options import Debug, LoadOptions, Misuse, expand_options
from sakiyomi.cli.show import error_console
from sakiyomi.errors import ParameterError

if TYPE_CHECKING:
    from sakiyomi.assemble import LoadedModel
    from sakiyomi.bench.run import Arm, Result, Row
    from sakiyomi.measure import Report
    from sakiyomi.params import SamplingParams


@expand_options
def bench(
    engine: LoadOptions,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="Prompts in Spec-Bench's format; by default 24 of ours.")
    ] = None,
    drafters: Annotated[
        list[str] | None, typer.Option("--drafter", "-d", help="Measure this drafter; repeat. By default auto.")
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
    peers: Annotated[
        list[str] | None, typer.Option("--peer", help="Measure another engine beside: transformers (extra torch).")
    ] = None,
    assistant: Annotated[
        str | None, typer.Option("--peer-assistant", help="A smaller model for the peer's assisted generation.")
    ] = None,
    png: Annotated[Path | None, typer.Option("--png", help="Draw the speeds into this file (extra bench).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    debug: Debug = False,
) -> None:
    """Measure how much faster each drafter makes decoding, on which kind of prompt.

    All ways of answering take turns on every prompt, so that each meets the same noise of the machine. Speeds are
    medians, their ratio to plain decoding has the bounds of a 95 % bootstrap.
    """
    from sakiyomi.bench.prompts import read_prompts
    from sakiyomi.bench.run import Settings, run_benchmark

    _refuse_early(peers, assistant, png)
    texts = read_prompts(prompts, per_group, groups)
    settings = Settings(
        drafters=tuple(drafters or ["auto"]),
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
            peers=_load_peers(peers, assistant, loaded, engine.threads),
            provenance={"command": shlex.join(["sakiyomi", *sys.argv[1:]])},
            report=report,
        )
    if png is not None:
        from sakiyomi.bench.chart import draw_chart

        draw_chart(result, png)
    if as_json:
        print(json.dumps(result.to_json(), ensure_ascii=False))
    else:
        _print(result)


def _refuse_early(peers: list[str] | None, assistant: str | None, png: Path | None) -> None:
    """Say what cannot be before minutes of measuring, not behind them."""
    for peer in peers or ():
        if peer != "transformers":
            raise Misuse(f"--peer {peer} is not known; there is transformers.")
    if assistant is not None and not peers:
        raise Misuse("--peer-assistant goes with --peer transformers; name the peer too.")
    if png is not None:
        from sakiyomi.bench.chart import require_matplotlib

        require_matplotlib()
        if not png.absolute().parent.is_dir():
            raise ParameterError(f"cannot write {png}: its folder does not exist; make it first.")


def _load_peers(
    peers: list[str] | None, assistant: str | None, loaded: LoadedModel, threads: int | None
) -> Callable[[SamplingParams], list[Arm]]:
    if not peers:
        return lambda params: []
    from sakiyomi.bench.peers import TransformersPeer

    return TransformersPeer(loaded, None if assistant is None else loading.fetch(assistant), threads).arms


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

MAX_POSITIONS = 3
COLUMNS: dict[str, Callable[[Row], str]] = {
    "group": lambda row: row.group,
    "t": lambda row: f"{row.temperature:g}",
    "drafter": lambda row: row.drafter if row.engine == "sakiyomi" else f"{row.engine}: {row.drafter}",
    "rule": lambda row: row.verifier,
    "tokens/s": lambda row: f"{row.tokens_per_s:.1f}",
    "speed": lambda row: f"{row.speedup.value:.2f}",
    "95 %": lambda row: f"{row.speedup.low:.2f}-{row.speedup.high:.2f}",
    "per step": lambda row: "" if row.mean_acceptance_length is None else f"{row.mean_acceptance_length:.2f}",
    "accepted": lambda row: _positions(row.acceptance_per_position),
    "if tried": lambda row: _positions(row.conditional_acceptance),
    "draft": lambda row: "" if row.draft_share is None else f"{100 * row.draft_share:.1f} %",
    "same": lambda row: "yes" if row.is_identical else "no" if row.keeps == "tokens" else "law",
}
CONSTANT = ("t", "rule")
"""Columns that are left out where they would say the same in every row."""
LEGEND = (
    "speed: over plain decoding in the same rounds; per step: tokens per forward pass; accepted: share of steps that "
    "accepted position 1, 2, 3; if tried: the same among the steps that got there; draft: the drafter's part of the "
    "time; same: the tokens of plain decoding (law: a rule that keeps the distribution)"
)


def _print(result: Result) -> None:
    from rich import box
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    columns = {
        name: cell
        for name, cell in COLUMNS.items()
        if name not in CONSTANT or len({cell(row) for row in result.rows}) > 1
    }
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, no_wrap=True, justify="left" if name in ("group", "drafter", "rule") else "right")
    previous = None
    for row in result.rows:
        if previous is not None and row.group != previous:
            table.add_section()
        previous = row.group
        table.add_row(*(Text(cell(row)) for cell in columns.values()), style="bold" if row.group == "all" else "")
    console = Console(highlight=False, soft_wrap=True)
    # Cut cells would help nobody, so a table that is too wide for the terminal is printed whole.
    console.width = max(console.width, Measurement.get(console, console.options.update(width=1000), table).maximum)
    console.print(table)
    console.print(Text(LEGEND, style="dim"))
    for name, value in result.provenance.items():
        console.print(Text(f"{name}: {value}", style="dim"))


def _positions(shares: tuple[float, ...]) -> str:
    """The first positions in hundredths: ".38 .21"."""
    return " ".join(f"{share:.2f}".removeprefix("0") for share in shares[:MAX_POSITIONS])
