"""`python -m sakiyomi` is the `sakiyomi` command."""

from sakiyomi.cli import main

main()
