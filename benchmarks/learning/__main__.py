"""``python -m benchmarks.learning``: train recipes to their end on real text, and nanoGPT on the same text.

A run of ours is ``nanotrain run`` of the recipe. nanoGPT's is ``train.py`` of a clone, with the recipe's
sizes, batch, optimizer, schedule and number of steps, on the recipe's text. It draws its windows anywhere
in the text; ours reads every sequence once. Both are evaluated on the same held-out sequences. Each run is
appended to a file as it ends, and a later command does not make it again.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.learning import nanogpt, ours
from benchmarks.learning.records import OURS, PEER, Finished, Plan, append, read
from benchmarks.learning.table import tables
from benchmarks.report import write_markdown
from nanotrain_core.errors import NanotrainError
from nanotrain_core.run import log

RECIPES = ("benchmarks/learning/gpt_small.toml", "benchmarks/learning/deepseek_small.toml")


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__)
    made.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"default: {' '.join(RECIPES)}")
    made.add_argument("--runs", type=Path, metavar="FILE", help="train, and append each run, a line of JSON")
    made.add_argument("--table", type=Path, metavar="FILE", help="train nothing: print the tables of a file")
    made.add_argument("--nanogpt", type=Path, metavar="CLONE", help="also train it, on recipes of its model")
    made.add_argument(
        "--seeds", type=int, nargs="+", default=[1, 2, 3], metavar="SEED", help="default: 1 2 3"
    )
    made.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the recipes")
    made.add_argument(
        "--folder", type=Path, metavar="DIR", help="keep run folders there, for nanotrain report"
    )
    made.add_argument("--markdown", type=Path, metavar="FILE", help="put the tables between their markers")
    return made


def plans(args: argparse.Namespace) -> Iterator[Plan]:
    """Yield what is to be run, seed after seed, so that whatever is finished is balanced."""
    for recipe in args.recipes or RECIPES:
        for seed in args.seeds:
            for who in (OURS, *([PEER] * (args.nanogpt is not None))):
                yield Plan(who, recipe, seed, tuple(args.set))


def train(plan: Plan, clone: Path | None, folder: Path) -> Finished:
    """Make one run."""
    recipe = ours.recipe_of(plan)
    data = ours.opened(recipe)
    own = folder / f"{Path(plan.recipe).stem}-{plan.who.lower()}-{plan.seed}"
    if plan.who == OURS:
        return ours.train(plan, recipe, data, own)
    assert clone is not None
    return nanogpt.train(plan, recipe, data, clone, own)


def make(args: argparse.Namespace, folder: Path) -> None:
    """Train what the file does not have, and append each run as it ends."""
    known = {run.plan for run in read(args.runs)} if args.runs.exists() else set()
    wanted = [plan for plan in plans(args) if plan not in known]
    for plan in wanted:
        if plan.who == PEER:
            nanogpt.refuse_others(ours.recipe_of(plan))
    for plan in wanted:
        run = train(plan, args.nanogpt, folder)
        append(args.runs, run)
        told = f"{plan.who}, {plan.recipe}, seed {plan.seed}: held out {run.held_out:.4f}"
        print(told, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the runs that the file does not have, then print its tables."""
    command = parser()
    args = command.parse_args(arguments)
    if (args.runs is None) == (args.table is None):
        command.error("give one of --runs and --table")
    if args.nanogpt is not None and not (args.nanogpt / "train.py").is_file():
        command.error(
            f"--nanogpt {args.nanogpt} has no train.py: git clone https://github.com/karpathy/nanoGPT"
        )
    log.ensure(0)
    try:
        if args.runs:
            with tempfile.TemporaryDirectory() as scratch:
                make(args, args.folder or Path(scratch))
    except NanotrainError as wrong:
        command.error(str(wrong))
    text = tables(read(args.runs or args.table))
    print(text)
    if args.markdown:
        write_markdown(args.markdown, text, what="learning")
    return 0


if __name__ == "__main__":
    sys.exit(main())
