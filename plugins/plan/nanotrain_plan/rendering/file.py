"""The page that ``--html FILE`` asks for: refused before any work where it cannot be written."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from nanotrain_core.api import NanotrainError, write_problem, write_text_atomically


def check_page(args: argparse.Namespace) -> None:
    """Look whether ``args.html``, if there is one, can be written.

    Raises:
        NanotrainError: its folder is missing or cannot be written to, or no regular file, or the recipe.
    """
    if args.html is None:
        return
    recipe = args.path if "path" in args else args.recipe
    if problem := write_problem(Path(args.html), recipe=recipe):
        raise NanotrainError(f"--html {args.html}: {problem}")


def write_page(args: argparse.Namespace, text: str) -> None:
    """Write the page to ``args.html``, through a symbolic link.

    Raises:
        NanotrainError: it cannot be written.
    """
    try:
        write_text_atomically(Path(args.html).resolve(), text)
    except OSError as problem:
        raise NanotrainError(f"--html {args.html} cannot be written: {problem.strerror}") from problem


def tell_page(args: argparse.Namespace) -> None:
    """Print where the page is, as the last line; on stderr where stdout has JSON."""
    if args.html:
        print(f"page: {args.html}", file=sys.stderr if args.json else sys.stdout)
