"""Load the model of a command, with a progress bar where it must be fetched first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from sakiyomi import hub
from sakiyomi.cli.options import EngineOptions, LoadOptions
from sakiyomi.cli.show import error_console, print_note
from sakiyomi.errors import ParameterError

if TYPE_CHECKING:
    from sakiyomi.assemble import LoadedModel, ModelOptions
    from sakiyomi.llm import LLM


def load_llm(options: EngineOptions) -> LLM:
    """The LLM that a command's options ask for."""
    from sakiyomi.assemble import check_drafter, choose_backend, make_verifier
    from sakiyomi.engine.budget import check_budget
    from sakiyomi.llm import LLM

    settings = model_options(options)
    # What cannot be is said before anything is fetched.
    choose_backend(settings)
    check_drafter(options.drafter)
    make_verifier(options.verifier)
    check_budget(options.budget)
    return LLM(
        str(fetch(options.model)),
        drafter=options.drafter,
        verifier=options.verifier,
        budget=options.budget,  # type: ignore[arg-type]  # just checked
        **asdict(settings),
    )


def load_for_bench(options: LoadOptions, drafters: Sequence[str], verifiers: Sequence[str]) -> LoadedModel:
    """The model of a command that builds its drafters itself, after a check of their names."""
    from sakiyomi.assemble import check_drafter, choose_backend, load_model, make_verifier

    settings = model_options(options)
    choose_backend(settings)
    for drafter in drafters:
        check_drafter(drafter)
    for verifier in verifiers:
        make_verifier(verifier)
    return load_model(str(fetch(options.model)), settings)


def model_options(options: LoadOptions) -> ModelOptions:
    """How to load the model, as `assemble` wants it."""
    from sakiyomi.assemble import ModelOptions

    return ModelOptions(
        dtype=options.dtype,
        device=options.device,
        backend=options.backend,  # type: ignore[arg-type]  # choose_backend checks it
        threads=options.threads,
        max_model_len=options.max_model_len,
    )


def share_plainly(llm: LLM) -> LLM:
    """Plain decoding over the model of `llm`."""
    from sakiyomi.llm import LLM

    return LLM.from_loaded(llm.loaded, drafter="none")


def fetch(name: str, *, checks_sum: bool = False) -> Path:
    """The path of a model, fetched with a progress bar on stderr if need be.

    Args:
        checks_sum: check a known model that was fetched before, and fetch it again if it is damaged.
    """
    with _progress() as progress:
        if checks_sum and name in hub.KNOWN_MODELS:
            return hub.pull(name, progress=progress)
        return hub.resolve(name, progress=progress)


def render_prompt(llm: LLM, text: str, system: str | None = None) -> str | list[int]:
    """The prompt of one question, through the chat template where the model has one."""
    if llm.chat_template is None:
        if system is not None:
            raise ParameterError(f"{llm.info.name} has no chat template to put a system message in; drop --system.")
        return text
    messages = [{"role": "user", "content": text}]
    return llm.render([{"role": "system", "content": system}, *messages] if system is not None else messages)


@contextmanager
def _progress() -> Iterator[hub.Progress]:
    """A reporter that draws a bar per kind of work in a terminal, and elsewhere names each kind once."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    console = error_console()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bars = Progress(*columns, console=console, transient=True)
    tasks: dict[str, TaskID] = {}

    def report(what: str, done: int, total: int) -> None:
        if what not in tasks:
            tasks[what] = bars.add_task(what, total=total or None)
            if console.is_terminal:
                bars.start()
            else:
                print_note(what)
        bars.update(tasks[what], completed=done)

    try:
        yield report
    finally:
        if tasks and console.is_terminal:
            bars.stop()
