"""The command line: `sakiyomi generate | chat | pull | demo | prove | train | tune | bench | doctor`."""

from __future__ import annotations

import signal
import sys

INTERRUPTED = 130


def main() -> None:
    """Entry point of the `sakiyomi` command."""
    try:
        from sakiyomi.cli.app import run  # takes long enough to be interrupted

        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = INTERRUPTED
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # from here on Python would only print a traceback
    sys.exit(code)
