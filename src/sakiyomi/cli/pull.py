"""`sakiyomi pull`: fetch a model ahead of its first use."""

from __future__ import annotations

from typing import Annotated

import typer

from sakiyomi.cli import loading
from sakiyomi.cli.options import Debug
from sakiyomi.hub import DEFAULT_MODEL


def pull(
    name: Annotated[str, typer.Argument(help="smollm2 or a hub id.")] = DEFAULT_MODEL,
    debug: Debug = False,
) -> None:
    """Fetch a model into the cache, or check and mend what is there, and print its path."""
    print(loading.fetch(name, checks_sum=True))
