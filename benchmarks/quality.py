"""``python -m benchmarks.quality``: what a precision costs in loss, beside bfloat16 and beside chance.

For each seed every precision trains the same model on the same tokens, none of them twice, from the same
weights. ``bf16-again`` starts from weights that are one millionth larger, so that a few are rounded to
another bfloat16: its distance from ``bf16`` is what chance alone does. The gap of any other precision is to
the mean of the two, seed by seed. With ``--after N`` bfloat16 makes the first N steps for all of them: where
differences grow most, chance has then no part, and neither has the other precision. Each run is appended to a
file as it ends, and a later command does not make it again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import attrs
import torch

from benchmarks.gap import LastLoss
from benchmarks.quality_table import AGAIN, Plan, Trained, read, tables
from benchmarks.report import write_markdown
from nanotrain_core.contracts import RunInfo, StepReport
from nanotrain_core.engine import RuntimeEngine
from nanotrain_core.errors import DataError
from nanotrain_core.optim.master_optimizer import MasterOptimizer
from nanotrain_core.recipe import load_recipe
from nanotrain_core.recipe.tree import Recipe
from nanotrain_core.run import log
from nanotrain_core.testing.pool import run_ranks

RECIPE = Path(__file__).with_name("quality.toml")
PRECISIONS = ("bf16", "fp8_deepseek_v3", AGAIN)
#: A run's curve has so many points, each the mean over as many steps.
POINTS = 20


def laid_out(layout: str) -> tuple[int, list[str]]:
    """Return how many ranks ``pp=2,tp=2,dp=2,ep=2,zero=2`` has, and what makes it of the recipe."""
    known = dict.fromkeys(("pp", "tp", "dp", "ep"), 1) | {"zero": 0}
    degrees = known | {
        name: int(number) for name, _, number in (w.partition("=") for w in layout.split(",") if w)
    }
    if unknown := degrees.keys() - known.keys():
        raise ValueError(f"{min(unknown)} in --layout is none of {', '.join(known)}")
    pp, tp, dp, ep, zero = degrees.values()
    ranks = pp * tp * dp
    if ranks == 1:
        return 1, []
    parallel = ['{use="tp", sequence_parallel=true}'] * (tp > 1) + ['{use="ep_deepseek"}'] * (ep > 1)
    parallel += ['{use="ddp"}'] * (not zero)
    changes = [f"topology.{name}={degrees[name]}" for name in ("pp", "tp", "ep")]
    changes += [f"parallel=[{', '.join(parallel)}]", f"run.ranks={ranks}"]
    changes += ["schedule.use=1f1b"] * (pp > 1)
    return ranks, changes + zero12(zero) * (zero > 0)


def zero12(stage: int) -> list[str]:
    """Return what makes it of the recipe, whose rate goes with the optimizer that it names."""
    config = load_recipe(RECIPE).optimizer.config
    schedule = attrs.asdict(config.lr_schedule, filter=lambda _, value: value is not None)
    keys = ", ".join(f"{key}={value!r}" for key, value in schedule.items())
    return [f"optimizer={{use='zero12', stage={stage}, lr={config.lr}, lr_schedule={{{keys}}}}}"]


def recipe_of(plan: Plan) -> Recipe:
    """Return what a run trains."""
    ranks, changes = laid_out(plan.layout)
    own = [*changes, f"run.seed={plan.seed}", f"run.steps={plan.steps}", *plan.changes]
    if plan.after:
        own.append(f"checkpoint={{use='simple', every={plan.after}, keep=1}}")
    if plan.precision != AGAIN:
        return load_recipe(RECIPE, overrides=[*own, f"precision.use={plan.precision}"], ranks=ranks)
    own.append("precision.use=bf16")
    if plan.after:
        return load_recipe(RECIPE, overrides=own, ranks=ranks)
    std = load_recipe(RECIPE, overrides=own, ranks=ranks).model.config.init_std
    return load_recipe(RECIPE, overrides=[*own, f"model.init_std={std * (1 + 1e-6)!r}"], ranks=ranks)


class Curve(LastLoss):
    """Keeps the loss of every step, too."""

    every_step = True
    reads_weights = False

    def __init__(self, change: Callable[[], None] | None = None) -> None:
        self.change = change
        """What happens to restored weights."""
        self.training: list[float] = []
        self.next_token: list[float] = []
        self.parameters = 0

    def on_start(self, run: RunInfo) -> None:
        """Count the model, and change what was restored."""
        self.parameters = run.parameters
        if self.change:
            self.change()

    def on_step(self, report: StepReport) -> None:
        """Keep it."""
        self.training.append(report.loss)
        self.next_token.append(report.losses["lm"])


def nudge(optimizer: MasterOptimizer) -> None:
    """Make masters one millionth larger."""
    with torch.no_grad():
        for shard in optimizer.master_shards:
            shard.master.store(shard.master.load() * (1 + 1e-6))


def common_steps(plan: Plan, folder: Path) -> Path:
    """Return the checkpoint that all precisions of a seed go on from; make it if there is none."""
    key = json.dumps([plan.seed, plan.steps, plan.after, plan.changes])
    own = folder / hashlib.sha256(key.encode()).hexdigest()[:16]
    found = own / "checkpoints" / f"step-{plan.after:08d}.safetensors"
    if not found.exists():
        recipe = recipe_of(attrs.evolve(plan, precision="bf16", layout=""))
        RuntimeEngine.from_recipe(recipe, folder=own).fit(steps=plan.after)
    return found


def train(plan: Plan, common: Path | None = None) -> Trained:
    """Run it, in this process or on ranks of their own.

    Args:
        plan: what to run.
        common: where the first steps, with ``plan.after``, are kept.
    """
    ranks, _ = laid_out(plan.layout)
    start = common_steps(plan, common) if plan.after and common else None
    if ranks == 1:
        return train_rank(plan, 0, start)
    of_rank, most = train_ranks, 24 * 3600.0
    found: list[Trained] = run_ranks(of_rank, ranks, plan, start, timeout=most, check_collectives=False)
    return found[0]


def train_ranks(plan: Plan, start: Path | None) -> Trained:
    """Run one rank of a process group."""
    return train_rank(plan, torch.distributed.get_rank(), start)


def train_rank(plan: Plan, rank: int, start: Path | None) -> Trained:
    """Run it, from the checkpoint ``start`` on if there is one.

    Raises:
        DataError: there is too little text for it to be read once.
    """
    torch.set_num_threads(1)
    recipe = recipe_of(plan)
    # Where the run saves its end, which nobody reads.
    folder = start and start.parents[1] / "ends" / f"{plan.precision} {plan.layout}".strip()
    engine = RuntimeEngine.from_recipe(recipe, rank=rank, folder=folder, resume=start and str(start))
    change = partial(nudge, engine.run.optimizer) if start and plan.precision == AGAIN else None
    data, curve, began = engine.run.feed.data, Curve(change), time.perf_counter()
    wanted = recipe.batch.sequences * plan.steps
    if wanted > data.train:
        raise DataError(f"{plan.steps} steps read {wanted} sequences, but there are {data.train} to train on")
    engine.events.monitors = [curve]
    engine.fit()
    return Trained(
        plan=plan,
        model=described(recipe.model.config, curve.parameters),
        text=data.describe(),
        tokens=wanted * recipe.batch.length,
        training=twentieths(curve.training),
        next_token=twentieths(curve.next_token),
        held_out=curve.loss,
        held_out_tokens=curve.tokens,
        seconds=round(time.perf_counter() - began, 1),
    )


def twentieths(losses: Sequence[float]) -> tuple[float, ...]:
    """Return the mean of each twentieth of the steps, or each step where there are fewer."""
    points = min(POINTS, len(losses))
    edges = [len(losses) * point // points for point in range(points + 1)]
    return tuple(mean(losses[first:last]) for first, last in pairwise(edges))


def described(model: Any, parameters: int) -> str:
    """Name a DeepSeek by its size."""
    experts = f"{model.experts} experts, {model.top_k} for a token, and {model.shared_experts} shared"
    return f"{parameters:,} parameters: {model.layers} layers, width {model.width}, {experts}"


def plans(args: argparse.Namespace) -> Iterator[Plan]:
    """Yield what is to be run, seed after seed, so that whatever is finished is balanced."""
    for seed in args.seeds:
        for precision in args.precisions:
            yield Plan(precision, seed, args.steps, args.layout, tuple(args.set), args.after)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the runs that the file does not have, then print its tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__)
    parser.add_argument(
        "--runs", type=Path, metavar="FILE", help="train, and append each run, a line of JSON"
    )
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="train nothing: print the tables of a file"
    )
    parser.add_argument("--steps", type=int, default=1800, help="optimizer steps of a run (default: 1800)")
    parser.add_argument(
        "--after", type=int, default=0, help="of them made by bf16 for all precisions (default: 0)"
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1, 2, 3, 4], metavar="SEED", help="default: 1 2 3 4"
    )
    parser.add_argument(
        "--precisions", nargs="+", default=PRECISIONS, metavar="NAME", help="also fp8_hybrid, fp32"
    )
    parser.add_argument(
        "--layout", default="", help="pp=2,tp=2,dp=2,ep=2,zero=2, or some of it (default: 1 rank)"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the recipe")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="put the tables between their markers")
    args = parser.parse_args(arguments)
    if (args.runs is None) == (args.table is None):
        parser.error("give one of --runs and --table")
    log.ensure(0)
    if args.runs:
        make(args.runs, plans(args))
    text = tables(read(args.runs or args.table))
    print(text)
    if args.markdown:
        write_markdown(args.markdown, text, what="quality")
    return 0


def make(file: Path, wanted: Iterable[Plan]) -> None:
    """Train what ``file`` does not have, and append each run as it ends."""
    known = {run.plan for run in read(file)} if file.exists() else set()
    for plan in wanted:
        if plan in known:
            continue
        run = train(plan, file.with_name(f"{file.stem}-steps"))
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(attrs.asdict(run)) + "\n")
        losses = f"{run.training[-1]:.4f}, held out {run.held_out:.4f}"
        told = f"{plan.precision} {plan.layout}, seed {plan.seed}: {losses}"
        print(told, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
