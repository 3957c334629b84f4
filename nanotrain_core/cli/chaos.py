"""``nanotrain chaos RECIPE``: inject every fault of the fault matrix into a real run."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from nanotrain_core.cli.argument_types import positive_int
from nanotrain_core.cli.common import plugin_arguments, resolve
from nanotrain_core.errors import FolderError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    from nanotrain_core.cli.common import add_recipe_options

    add_recipe_options(parser)
    parser.add_argument(
        "--steps", type=positive_int, default=24, metavar="N", help="steps of a run; default 24"
    )
    parser.add_argument(
        "--every", type=positive_int, default=6, metavar="N", help="steps between checkpoints; default 6"
    )
    parser.add_argument(
        "--repeat", type=positive_int, default=1, metavar="N", help="times to try each row; default 1"
    )
    parser.add_argument(
        "--seed", type=int, default=1, metavar="N", help="seed for the choice of steps, ranks and bits"
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="ROW", help="a row's number, or a part of its name"
    )
    parser.add_argument("--soak", type=positive_int, metavar="N", help="N random faults in one run, no rows")
    parser.add_argument("--short", action="store_true", help="the few rows that the tests run")
    parser.add_argument(
        "--hang-timeout", type=float, default=12.0, metavar="S", help="run.hang_timeout; default 12"
    )
    parser.add_argument("--markdown", metavar="FILE", help="also write the table here")
    parser.add_argument(
        "--keep", metavar="FOLDER", help="leave the runs here; default: a folder that is removed"
    )


def run(args: argparse.Namespace) -> int:
    """Run the rows, print the table; 1 if any run did not survive."""
    from rich.console import Console

    from nanotrain_core.testing.chaos.bench import Bench, Settings
    from nanotrain_core.testing.chaos.matrix import NOT_RUN, chosen
    from nanotrain_core.testing.chaos.soak import soak
    from nanotrain_core.testing.chaos.table import markdown, table, try_rows

    recipe = resolve(args).recipe
    settings = Settings(
        recipe=str(Path(args.recipe).resolve()) if Path(args.recipe).exists() else args.recipe,
        overrides=tuple(args.set),
        plugins=tuple(str(Path(path).resolve()) for path in plugin_arguments(args).local),
        ranks=recipe.run.ranks,
        steps=args.steps,
        every=args.every,
        hang_timeout=args.hang_timeout,
    )
    rows = chosen(args.only, short=args.short)
    if args.keep and Path(args.keep).is_dir() and any(Path(args.keep).iterdir()):
        raise FolderError(f"--keep {args.keep}: it is not empty; expected a new folder")
    with tempfile.TemporaryDirectory(prefix="nanotrain-chaos-") as scratch:
        root = Path(args.keep).resolve() if args.keep else Path(scratch)
        bench = Bench(settings, root)
        if args.soak:
            return soak(bench, args.soak, args.seed)
        tried = try_rows(
            bench, rows, repeat=args.repeat, seed=args.seed, tell=lambda line: print(line, flush=True)
        )
    Console(width=None if sys.stdout.isatty() else 130).print(table(tried))
    for what, why in NOT_RUN.items():
        print(f"not run here: {what}: {why}")
    if args.markdown:
        Path(args.markdown).write_text(markdown(tried) + "\n", encoding="utf-8")
    survived = all(row.survived == len(row.outcomes) for row in tried)
    return 0 if tried and survived else 1
