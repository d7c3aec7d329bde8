"""`sakiyomi pull`: fetch a model ahead of its first use."""

from __future__ import annotations

from typing import Annotated

import typer

from sakiyomi.cli import loading
from sakiyomi.cli.options import Debug
from sakiyomi.cli.show import print_note
from sakiyomi.hub import DEFAULT_MODEL


def pull(
    name: Annotated[str, typer.Argument(help="smollm2 or a hub id.")] = DEFAULT_MODEL,
    clean: Annotated[
        bool,
        typer.Option(
            "--clean", help="Fetch nothing; remove packed weights of models that are gone or changed, and print them."
        ),
    ] = False,
    debug: Debug = False,
) -> None:
    """Fetch a model into the cache, or check and mend what is there, and print its path."""
    if clean:
        return _clean()
    print(loading.fetch(name, checks_sum=True))


def _clean() -> None:
    from sakiyomi.models.packed import sweep

    removed = sweep()
    for path, _ in removed:
        print(path)
    print_note(f"files removed: {len(removed)}, {sum(size for _, size in removed) / 1e6:.0f} MB")
