"""``nanotrain recipes``: the recipes included with nanotrain."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
from pathlib import Path

from nanotrain_core.errors import Exit, FolderError
from nanotrain_core.recipe.source import find_recipe, shipped_recipes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    actions = parser.add_subparsers(dest="action", metavar="ls|cp")
    actions.add_parser("ls", help="list the recipes (the default)")
    copy = actions.add_parser("cp", help="copy a recipe, to change it")
    copy.add_argument("name", metavar="NAME", help="for example laptop")
    copy.add_argument("destination", metavar="DEST", nargs="?", default=".", help="a file or a folder")


def run(args: argparse.Namespace) -> int:
    """List recipes or copy one."""
    if args.action == "cp":
        target = _copy(find_recipe(args.name), Path(args.destination))
        print(target)
        # A name without .toml would be that of the recipe shipped.
        print(f"nanotrain: run it with: nanotrain run {shlex.quote(str(target))}", file=sys.stderr)
        return Exit.DONE
    recipes = shipped_recipes()
    for name in sorted(recipes, key=lambda name: (_is_fragment(name), name)):
        what = "[model] to extend: " if _is_fragment(name) else ""
        print(f"{name.removesuffix('.toml'):28} {what}{_first_comment(recipes[name])}".rstrip())
    return Exit.DONE


def _is_fragment(name: str) -> bool:
    """Return whether a file has a table for other recipes, and is no run."""
    return name.startswith("fragments/")


def _first_comment(path: Path) -> str:
    """Return a recipe's description from its first line."""
    with path.open(encoding="utf-8") as lines:
        first = lines.readline()
    return first.lstrip("# ").rstrip() if first.startswith("#") else ""


def _copy(source: Path, destination: Path) -> Path:
    """Copy a recipe without ever overwriting a file.

    Raises:
        FolderError: the file already exists, or it cannot be written.
    """
    target = destination / source.name if destination.is_dir() else destination
    part = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        part.write_bytes(source.read_bytes())
        os.link(part, target)  # unlike a rename, refuses to overwrite
    except OSError as error:
        raise FolderError(f"{target}: {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):  # in a read-only folder, which holds no part either
            part.unlink()
    return target
