"""`sakiyomi train`: make a drafter for a model, from its own text to what it reaches."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sakiyomi.cli import loading
from sakiyomi.cli.options import Debug
from sakiyomi.cli.show import error_console, print_note

if TYPE_CHECKING:
    from rich.console import Console

    from sakiyomi.train.estimate import Estimate, Report
    from sakiyomi.train.pipeline import Trained


def train(
    drafter: Annotated[str, typer.Argument(help="Which drafter to make: mlp, table, ...", show_default=False)],
    *,
    target: Annotated[str, typer.Option("--target", "-m", help="smollm2, a folder, a .gguf file or a hub id.")],
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="A TOML recipe; what it leaves out is the package's own.")
    ] = None,
    stages: Annotated[
        list[str] | None,
        typer.Option("--stage", help="Only this stage: data, capture, fit, measure or export; repeat for several."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Where everything lies; by default train-MODEL in this folder.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change one thing in the recipe: section.key=value; repeat for several."),
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Number format of the target's weights.")] = None,
    device: Annotated[str, typer.Option("--device", help="Where to compute: cpu, cuda, ...")] = "cpu",
    backend: Annotated[str, typer.Option("--backend", help="native (our CPU kernels), torch, or auto.")] = "auto",
    threads: Annotated[int | None, typer.Option("--threads", help="Threads; by default one per core.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    debug: Debug = False,
) -> None:
    """Make a drafter for a model out of the model's own text.

    Stops and goes on at any point: run the same command again. Each long stage says before it begins what it will take.
    """
    from sakiyomi.assemble import ModelOptions, choose_backend, load_model
    from sakiyomi.train.pipeline import STAGES, Pipeline
    from sakiyomi.train.recipe import read_recipe

    recipe = read_recipe(drafter, config, settings or ())
    options = ModelOptions(dtype=dtype, device=device, backend=backend, threads=threads)  # type: ignore[arg-type]
    choose_backend(options)
    loaded = load_model(str(loading.fetch(target)), options)
    folder = out or Path(f"train-{re.sub(r'[^A-Za-z0-9._-]+', '-', loaded.path.stem)}")
    with _progress() as report:
        trained = Pipeline(loaded, recipe, folder, report, _announce).run(stages or STAGES)
    if as_json:
        print(json.dumps(_describe(trained), ensure_ascii=False))
    else:
        _print(trained, drafter)


def _announce(estimate: Estimate) -> None:
    print_note(str(estimate))


@contextmanager
def _progress() -> Iterator[Report]:
    """A bar for what is being done on stderr, where that is a terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = error_console()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("starting", total=None)
        last = [""]

        def report(what: str, done: int, total: int) -> None:
            kind = what.partition(":")[0]  # figures behind a colon change while the work goes on
            if kind != last[0]:
                bars.reset(task, total=total or None)
                last[0] = kind
            bars.update(task, description=what, completed=done, total=total or None)

        yield report


def _describe(trained: Trained) -> dict[str, Any]:
    return {
        "drafter": None if trained.path is None else str(trained.path),
        "folder": None if trained.folder is None else str(trained.folder),
        "counts": trained.counts,
        "measured": trained.measured,
    }


def _print(trained: Trained, drafter: str) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    counts = trained.counts
    console.print(
        f"text: {counts['documents']} documents, {counts['answers']} answers of {counts['answer_tokens']} tokens; "
        f"{counts['loops']} of them ran into a loop; dropped {counts['duplicates']} prompts that were there before and "
        f"{counts['empty']} without words"
    )
    if trained.measured is not None:
        _print_measured(console, trained.measured)
    if trained.path is not None:
        console.print(f"drafter: {trained.path}   use it with --drafter {drafter}:path={trained.path}")
    if trained.folder is not None:
        console.print(f"for vLLM: {trained.folder}")


def _print_measured(console: Console, results: list[dict[str, Any]]) -> None:

    lengths = sorted({one["length"] for one in results})
    deepest = range(1, max(lengths) + 1)
    rows: dict[tuple[str, str, str], dict[int, dict[str, Any]]] = {}
    for one in results:
        rule = one["verifier"] if one["temperature"] > 0 else "any"
        rows.setdefault((one["drafter"], f"{one['temperature']:g}", rule), {})[one["length"]] = one
    steps = {key: [_figure(cells.get(k), "mean_acceptance_length") for k in lengths] for key, cells in rows.items()}
    _print_table(console, "tokens per step, drafts of K tokens", [f"K={length}" for length in lengths], steps)
    shares = {key: _shares(cells[max(cells)], len(deepest)) for key, cells in rows.items()}
    _print_table(console, "share of steps that accept the K-th token", [f"{k}." for k in deepest], shares)


def _print_table(console: Console, title: str, names: list[str], rows: dict[tuple[str, str, str], list[str]]) -> None:
    from rich import box
    from rich.table import Table

    table = Table("drafter", "temp.", "rule", *names, title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.padding = (0, 1, 0, 0)
    for column in table.columns:
        column.no_wrap = True
    for key, cells in rows.items():
        table.add_row(*key, *cells)
    console.print(table)


def _figure(cell: dict[str, Any] | None, key: str) -> str:
    return "" if cell is None else f"{cell[key]:.2f}"


def _shares(cell: dict[str, Any], count: int) -> list[str]:
    shares = [f"{share:.2f}" for share in cell["acceptance_per_position"][:count]]
    return [*shares, *["0"] * (cell["length"] - len(shares)), *[""] * (count - cell["length"])]
