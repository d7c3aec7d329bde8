"""`sakiyomi prove`: a certificate that speculation leaves the output alone."""

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
from sakiyomi.cli.options import Debug, EngineOptions, expand_options
from sakiyomi.cli.show import error_console
from sakiyomi.errors import ParameterError

if TYPE_CHECKING:
    from sakiyomi.llm import LLM
    from sakiyomi.params import SamplingParams
    from sakiyomi.prove.certificate import Certificate, Plan, Report

MAX_PROMPTS = 64


@expand_options
def prove(
    engine: EngineOptions,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="A text file with a prompt per line; by default three of ours.")
    ] = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option(
            "--temperature", "-t", help="Test at this temperature; repeat. By default 0, 1, and .7 at top-p .9."
        ),
    ] = None,
    top_p: Annotated[float, typer.Option("--top-p", help="With --temperature: keep this share.")] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", help="With --temperature: keep the k most probable; 0: all.")] = 0,
    num_tokens: Annotated[int, typer.Option("--tokens", help="Tokens of each answer that is compared.")] = 32,
    num_draws: Annotated[int, typer.Option("--draws", help="Answers drawn to test a distribution.")] = 6000,
    seed: Annotated[int, typer.Option("--seed", help="Seed of everything that is drawn.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Write the evidence to this file, one HTML page.")] = None,
    debug: Debug = False,
) -> int:
    """Prove on this machine that speculation leaves the output alone; the exit code is 0 only if it is proven.

    For `match`: the tokens are those of plain decoding. For `rejection`, `block`, `tree` and `traversal`: the
    distribution is the model's own, by a sequential test with a stated rate of false alarms. Verifiers that are wrong
    on purpose must fail in the same run, else there is no certificate.
    """
    from sakiyomi.prove.certificate import Plan

    texts = _read_prompts(prompts)
    plan = Plan(settings=_settings(temperature, top_p, top_k), num_tokens=num_tokens, num_draws=num_draws, seed=seed)
    certificate = _certify(engine, texts, plan)
    if html is not None:
        from sakiyomi.prove.page import render

        try:
            html.write_text(render(certificate), encoding="utf-8")
        except OSError as error:
            raise ParameterError(f"cannot write {html} ({error.strerror}); check the path.") from error
    if as_json:
        print(json.dumps(certificate.to_json(), ensure_ascii=False))
    else:
        _print(certificate)
    return 0 if certificate.is_proven else 1


def _certify(engine: EngineOptions, texts: list[str] | None, plan: Plan) -> Certificate:
    from sakiyomi.assemble import make_drafter, make_verifier
    from sakiyomi.prove.certificate import DEFAULT_PROMPTS, certify, describe_model, refuse_lossy

    verifier = make_verifier(engine.verifier)
    refuse_lossy(verifier)  # before a model is fetched for it
    llm = loading.load_llm(engine)
    options = loading.model_options(engine)
    prompts = [_encode(llm, text) for text in texts or DEFAULT_PROMPTS]
    provenance = {
        "command": shlex.join(["sakiyomi", *sys.argv[1:]]),
        "drafter": engine.drafter,
        "verifier": engine.verifier,
        "is_lossless": verifier.is_lossless,
        **describe_model(llm.loaded),
    }
    with _progress() as report:
        return certify(
            llm.loaded,
            lambda wrap: make_drafter(engine.drafter, llm.loaded, options, draw=verifier.draw, wrap=wrap),
            verifier,
            prompts,
            plan,
            provenance=provenance,
            report=report,
        )


def _encode(llm: LLM, text: str) -> list[int]:
    prompt = loading.render_prompt(llm, text)
    if not isinstance(prompt, str):
        return prompt
    if llm.tokenizer is None:
        raise ParameterError(f"{llm.info.name} has no tokenizer, so it cannot be given a prompt.")
    return llm.tokenizer.encode(prompt)


def _settings(temperatures: list[float] | None, top_p: float, top_k: int) -> tuple[SamplingParams, ...]:
    from sakiyomi.params import SamplingParams
    from sakiyomi.prove.certificate import DEFAULT_SETTINGS

    if not temperatures:
        if top_p != 1 or top_k != 0:
            raise ParameterError("--top-p and --top-k go with --temperature; name the temperatures to test.")
        return DEFAULT_SETTINGS
    return tuple(SamplingParams(temperature=t, top_p=top_p, top_k=top_k) for t in temperatures)


def _read_prompts(path: Path | None) -> list[str] | None:
    if path is None:
        return None
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ParameterError(f"cannot read the prompts from {path} ({error.strerror}); check the path.") from error
    except UnicodeDecodeError as error:
        raise ParameterError(f"{path} is not valid UTF-8 (byte {error.start}); give a text in UTF-8.") from error
    texts = [line.strip() for line in lines if line.strip()]
    if not texts:
        raise ParameterError(f"{path} holds no prompt; write one per line.")
    if len(texts) > MAX_PROMPTS:
        raise ParameterError(f"{path} holds {len(texts)} prompts; give at most {MAX_PROMPTS}.")
    return texts


@contextmanager
def _progress() -> Iterator[Report]:
    """A bar for what is being done on stderr, where that is a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = error_console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("starting", total=None)

        def report(what: str, done: int, total: int) -> None:
            bars.update(task, description=what, completed=done, total=total)

        yield report


# ---------------------------------------------------------------------------------------------- the report

STYLES = {"proven": "bold green", "refuted": "bold red", "void": "bold yellow"}


def _print(certificate: Certificate) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from sakiyomi.prove.page import provenance_rows, summarize, tables

    console = Console(highlight=False, soft_wrap=True)
    for table in (table.without_details() for table in tables(certificate, is_short=True)):
        shown = Table(*table.head, title=table.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        shown.padding = (0, 1, 0, 0)
        for column in shown.columns:
            column.no_wrap = True
        for row in table.rows:
            shown.add_row(*(Text(cell) for cell in row))
        console.print(shown)
    for name, value in provenance_rows(certificate):
        console.print(Text(f"{name}: {value}", style="dim"))
    console.print(Text(certificate.outcome.upper(), style=STYLES[certificate.outcome]))
    for line in summarize(certificate):
        console.print(Text(line))
