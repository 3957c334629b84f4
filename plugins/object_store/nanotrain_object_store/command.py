"""``nanotrain store``: the checkpoints of a prefix, without a run. Torch-free."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from nanotrain_core.api import CheckpointError, Exit, NanotrainError, RecipeError, show_progress
from nanotrain_object_store import problems_of
from nanotrain_object_store.catalogue import look, missing, read_markers
from nanotrain_object_store.fetch import NotFetched, fetch, put_in_place
from nanotrain_object_store.store import Store, in_words
from nanotrain_object_store.stored import Stored, find_local


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("what", choices=("ls", "verify", "fetch"), help="the action")
    parser.add_argument("url", help="the prefix of a run, such as s3://bucket/runs/mine")
    parser.add_argument("to", nargs="?", type=Path, help="fetch: the folder to put the checkpoint in")
    parser.add_argument(
        "--step", type=int, help="step of one checkpoint; default: the newest for fetch, all for the others"
    )


def run(args: argparse.Namespace) -> int:
    """Do it.

    Raises:
        NanotrainError: there is no such checkpoint, it is damaged, or the store does not answer.
    """
    if problems := [text for _, text in problems_of(args.url)]:
        raise RecipeError(problems)
    if (args.to is None) == (args.what == "fetch"):
        raise NanotrainError(f"nanotrain store {args.what}: a folder is given to fetch, and to nothing else")
    try:
        return _do(args, Store(args.url))
    except (NanotrainError, KeyboardInterrupt):
        raise
    except Exception as problem:
        raise NanotrainError(f"{args.url} cannot be read: {in_words(problem)}") from None


def _do(args: argparse.Namespace, store: Store) -> int:
    listing = look(store)
    bad: list[str] = []
    found = [each for each in read_markers(store, listing, bad.append) if args.step in (None, each.step)]
    if not found and not bad:
        steps = ", ".join(str(each.step) for each in reversed(read_markers(store, listing))) or "none"
        raise CheckpointError(f"{store.url} has no such checkpoint; steps there: {steps}")
    if args.what == "fetch":
        return _fetch(store, found, bad, args.to)
    for stored in reversed(found):
        problems = missing(stored, listing.objects[stored.entry])
        if args.what == "verify" and not problems:
            problems = _read(store, stored)
        bad += problems
        what = "damaged" if problems else "whole" if args.what == "verify" else f"run {stored.run}"
        print(f"{stored.step:>10}  {stored.nbytes / 1e6:>12,.1f} MB  {len(stored.files):>5} files  {what}")
    for problem in bad:
        print(problem, file=sys.stderr)
    return Exit.USER if bad else Exit.DONE


def _read(store: Store, stored: Stored) -> list[str]:
    """Download each file, compare it, and delete it."""
    import tempfile

    problems = []
    with tempfile.TemporaryDirectory(prefix="nanotrain-store-") as scratch:
        for name in stored.files:
            try:
                problem = fetch(store, stored, [name], Path(scratch))
            except NotFetched as error:
                problem = str(error)
            problems += [problem] if problem else []
            (Path(scratch) / name).unlink(missing_ok=True)
    return problems


def _fetch(store: Store, found: list[Stored], bad: list[str], to: Path) -> int:
    if not found:
        raise CheckpointError(bad[0])
    stored = found[0]
    if (there := find_local(to, stored.step)) is not None:
        raise CheckpointError(f"{there} is there already")
    scratch = to / f".tmp-fetch-{stored.step:08d}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        with show_progress(f"fetching step {stored.step}", total=stored.nbytes, unit="B") as advance:
            problem = fetch(store, stored, stored.files, scratch, advance)
        if problem:
            raise CheckpointError(problem)
        print(put_in_place(stored, scratch, to))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Exit.DONE
