"""The command line: `sakiyomi generate | chat | pull | demo | prove`."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the `sakiyomi` command."""
    from sakiyomi.cli.app import run

    sys.exit(run(sys.argv[1:]))
