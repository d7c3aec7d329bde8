"""`sakiyomi doctor`: what is wrong with a trained drafter, before anything is served with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sakiyomi.cli import loading
from sakiyomi.cli.options import ENGINE, Debug, LoadOptions, expand_options
from sakiyomi.cli.show import disarm, error_console
from sakiyomi.errors import CheckpointError
from sakiyomi.hub import DEFAULT_MODEL

if TYPE_CHECKING:
    from sakiyomi.assemble import LoadedModel
    from sakiyomi.doctor.findings import Diagnosis, Finding, Probe
    from sakiyomi.doctor.probe import Report

NUM_PROMPTS, NUM_IDS = 3, 12


@dataclass(frozen=True, kw_only=True)
class TargetOptions(LoadOptions):
    """The model that the drafter is for."""

    model: Annotated[
        str,
        typer.Option(
            "--target", "-m", help="The model it is for: smollm2, a folder, a .gguf file or a hub id.",
            rich_help_panel=ENGINE,
        ),
    ] = DEFAULT_MODEL  # fmt: skip


@expand_options
def doctor(
    checkpoint: Annotated[
        Path, typer.Argument(help="A folder of EAGLE, P-EAGLE, speculators or Medusa heads, or a file of ours.")
    ],
    engine: TargetOptions,
    num_tokens: Annotated[
        int, typer.Option("--tokens", min=0, help="Tokens of each of three answers of the probe; 0 leaves it out.")
    ] = 64,
    is_strict: Annotated[bool, typer.Option("--strict", help="Let warnings count as faults.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    debug: Debug = False,
) -> int:
    """Find what is wrong with a trained drafter; the exit code is 0 only if nothing is.

    Looks at names, shapes and values of the weights, compares them with the target's, and lets the drafter draft:
    acceptance, whether that is more than chance, and whether another reading of the file (layers, norms, rotary base,
    heads) would do better.
    """
    from sakiyomi.assemble import choose_backend, load_model
    from sakiyomi.doctor.examine import examine

    if not checkpoint.expanduser().exists():
        raise CheckpointError(f"there is no file or folder {checkpoint}; check the path.")
    options = loading.model_options(engine)
    choose_backend(options)
    loaded = load_model(str(loading.fetch(engine.model)), options)
    prompts = _read_prompts(loaded) if num_tokens else []
    with _progress() as report:
        diagnosis = examine(checkpoint.expanduser(), loaded, prompts, num_tokens=num_tokens, report=report)
    if as_json:
        print(json.dumps(diagnosis.to_json(), ensure_ascii=False))
    else:
        _print(diagnosis)
    return 0 if diagnosis.is_healthy and not (is_strict and diagnosis.warnings) else 1


def _read_prompts(loaded: LoadedModel) -> list[list[int]]:
    """The first prompts of our own set, through the model's chat template; random ids where it has no tokenizer."""
    import numpy as np

    from sakiyomi.bench.prompts import read_prompts
    from sakiyomi.bench.run import encoder

    if loaded.tokenizer is None:
        rng = np.random.default_rng(0)
        return [rng.integers(loaded.model.info.vocab_size, size=NUM_IDS).tolist() for _ in range(NUM_PROMPTS)]
    encode = encoder(loaded)
    return [encode(texts[0]) for texts in list(read_prompts(per_group=1).values())[:NUM_PROMPTS]]


@contextmanager
def _progress() -> Iterator[Report]:
    """A bar on stderr, where that is a terminal."""
    from rich.progress import BarColumn, Progress, TextColumn

    console = error_console()
    columns = (TextColumn("{task.description}"), BarColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("reading", total=None)
        yield lambda what, done, total: bars.update(task, description=what, completed=done, total=total or None)


def _print(diagnosis: Diagnosis) -> None:
    _line(f"checkpoint: {diagnosis.checkpoint}")
    _line(f"target:     {diagnosis.target}")
    if diagnosis.summary is not None:
        _line(f"read as:    {diagnosis.summary}")
    for finding in (*diagnosis.faults, *diagnosis.warnings):
        _print_finding(finding)
    if diagnosis.probe is not None:
        _print_probe(diagnosis.probe)
    faults, warnings = len(diagnosis.faults), len(diagnosis.warnings)
    counted = f"{faults} fault{'s' * (faults != 1)}, {warnings} warning{'s' * (warnings != 1)}"
    _line(f"\n{'HEALTHY' if diagnosis.is_healthy else 'FAULTY'}: {counted}")


def _print_finding(finding: Finding) -> None:
    _line(f"\n{'FAULT' if finding.is_fault else 'warning'} in {finding.part}: {finding.found}")
    if finding.expected:
        _line(f"  expected: {finding.expected}")
    if finding.remedy:
        _line(f"  do:       {finding.remedy}")


def _print_probe(probe: Probe) -> None:
    places = " ".join(f"{share:.2f}".removeprefix("0") for share in probe.acceptance_per_position)
    _line(
        f"\nprobe, greedy: {probe.num_tokens} tokens at {probe.mean_acceptance_length:.2f} a step; accepted by "
        f"position: {places or 'none'}"
    )
    level = "the level of chance" if probe.is_chance else f"chance would give {probe.chance:.1%}"
    _line(f"first token right at {probe.agreement:.1%} of {probe.num_starts} places; {level}")
    if probe.trials:
        _line(f"drafted tokens right on average: {probe.mean_length:.2f} as the file tells")
        for trial in probe.trials:
            _line(f"  {trial.mean_length:.2f} with {trial.change}")


def _line(text: str) -> None:
    print("\n".join(disarm(part) for part in text.split("\n")))
