"""`sakiyomi tune`: whether a model's own first layers are worth drafting with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sakiyomi.cli import loading
from sakiyomi.cli.options import Debug, LoadOptions, expand_options
from sakiyomi.cli.show import error_console

if TYPE_CHECKING:
    from sakiyomi.measure import Report
    from sakiyomi.tune import Tuning


@expand_options
def tune(
    engine: LoadOptions,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="Prompts in Spec-Bench's format; by default some of ours.")
    ] = None,
    per_group: Annotated[int, typer.Option("--per-group", min=1, help="Prompts of each group at most.")] = 1,
    num_tokens: Annotated[int, typer.Option("--tokens", help="Tokens of an answer at most.")] = 64,
    num_rounds: Annotated[
        int, typer.Option("--rounds", min=1, help="How often each prompt is answered in the check.")
    ] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    debug: Debug = False,
) -> None:
    """Measure how well and how fast a part of the model's layers drafts for all of them, and keep the choice.

    The drafter `layerskip` reads it. Where no part makes decoding faster, it drafts nothing from then on.
    """
    from sakiyomi.bench.prompts import read_prompts
    from sakiyomi.bench.run import encoder
    from sakiyomi.tune import keep_choice, tune_layerskip

    groups = read_prompts(prompts, per_group)
    loaded = loading.load_for_bench(engine, (), ())
    encode = encoder(loaded)
    ids = [encode(text) for texts in groups.values() for text in texts]
    with _progress() as report:
        tuning = tune_layerskip(loaded, ids, num_tokens=num_tokens, num_rounds=num_rounds, report=report)
    path = keep_choice(loaded, tuning)
    if as_json:
        print(json.dumps({**tuning.to_json(), "file": str(path)}, ensure_ascii=False))
    else:
        _print(tuning, path)


@contextmanager
def _progress() -> Iterator[Report]:
    """A bar on stderr, where that is a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = error_console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("starting", total=None)
        yield lambda what, done, total: bars.update(task, description=what, completed=done, total=total)


def _print(tuning: Tuning, path: Path) -> None:
    print(
        f"{tuning.model}: {tuning.num_tokens} tokens of {tuning.num_prompts} answers, greedy; "
        f"a plain step takes {tuning.plain_ms:.2f} ms"
    )
    passes = "  ".join(f"{rows}: {cost:.2f}" for rows, cost in enumerate(tuning.pass_costs, 1))
    print(f"a pass over M rows, in plain steps: {passes}\n")
    print(f"{'layers':14} {'agrees':>7} {'a token costs':>14} {'length':>7} {'predicted':>10}")
    for one in tuning.exits:
        print(
            f"{one.candidate.name:14} {100 * one.agreement:6.1f}% {one.draft_cost:14.2f} {one.length:7} "
            f"{one.predicted:9.2f}x"
        )
    print()
    for check in tuning.checks:
        spread = check.speedup
        print(
            f"measured: {check.candidate.name}, {check.length} drafted: {spread.value:.2f} times plain "
            f"({spread.low:.2f} to {spread.high:.2f}), {check.mean_acceptance_length:.2f} tokens a step"
        )
    choice, best = tuning.choice, tuning.best
    if choice["pays"]:
        print(f"layerskip pays: {best.candidate.name}, {best.length} drafted tokens. Kept in {path}")
    else:
        print(
            "layerskip does not pay with this model: no part of its layers makes decoding faster. "
            f"Kept in {path}; --drafter layerskip drafts nothing now."
        )
