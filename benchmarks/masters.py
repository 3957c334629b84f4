"""``python -m benchmarks.masters``: validation losses of low-bit masters and moments beside float32 ones.

Every variant trains the same model on the same tokens from the same weights, once for each seed. The gap is
the mean over seeds of its loss less that of float32 masters and moments with that seed, with its standard
error. Where moments are narrow, float32 ones of the same gradients are kept beside them, and how far these
are away after the last step is the error of the moments.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import attrs
import torch

from benchmarks.gap import Gap, LastLoss
from benchmarks.report import write_markdown
from nanotrain_core.compose import Run
from nanotrain_core.engine import RuntimeEngine
from nanotrain_core.optim import moments
from nanotrain_core.optim.adamw import AdamW
from nanotrain_core.precision.quantized_storage import storage_of
from nanotrain_core.recipe import load_recipe
from nanotrain_core.run import log

RECIPE = Path(__file__).with_name("masters.toml")


@attrs.define(frozen=True)
class Setup:
    """What one row trains with."""

    masters: str
    """The name of a precision, and of its format and variant."""
    moments: str = "float32"
    """``optimizer.moment_dtype``."""

    @property
    def name(self) -> str:
        """How the table calls it."""
        return f"{self.masters}, {self.moments} moments"

    @property
    def precision(self) -> dict[str, str]:
        """Its table in a recipe."""
        if self.masters == BASELINE.masters:
            return {"use": "bf16"}
        form, variant = self.masters.split()
        return {"use": "fp4_master", "format": form, "variant": variant}


BASELINE = Setup("bf16 with float32 master")
VARIANTS = {
    "bf16": ("remainder", "residual", "eco", "naive"),
    "nvfp4": ("residual", "eco", "naive"),
    "nf4": ("residual", "eco", "naive"),
}
SETUPS = (
    BASELINE,
    *(Setup(f"{form} {variant}") for form, variants in VARIANTS.items() for variant in variants),
    *(
        Setup(masters, dtype)
        for masters in (BASELINE.masters, "bf16 residual", "nvfp4 residual", "nvfp4 eco")
        for dtype in ("bfloat16", "int8")
    ),
)


class Shadow:
    """Float32 moments of the gradients that an optimizer gets, as torch's AdamW would have them."""

    def __init__(self, optimizer: AdamW) -> None:
        self.optimizer, self.state = optimizer, {}
        optimizer.inner.register_step_pre_hook(self.follow)

    def follow(self, inner: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Take the gradients of a step."""
        for group in inner.param_groups:
            beta1, beta2 = group["betas"]
            for weight in group["params"]:
                first, second = self.state.setdefault(weight, torch.zeros(2, *weight.grad.shape))
                first.lerp_(weight.grad, 1 - beta1)
                second.mul_(beta2).addcmul_(weight.grad, weight.grad, value=1 - beta2)

    def errors(self) -> tuple[float, float, float]:
        """Return how far first moments, roots of second ones, and updates are away: relative, 2-norm."""
        parts = torch.zeros(3, 2, dtype=torch.float64)
        for weight, wanted in self.state.items():
            kept = self.optimizer.inner.state[weight]
            found = [moments.load(kept, name, torch.float32) for name in (moments.FIRST, moments.SECOND)]
            for row, (near, exact) in enumerate(zip(sides(*found), sides(*wanted), strict=True)):
                parts[row] += torch.stack([(near - exact).square().sum(), exact.square().sum()])
        first, root, update = (parts[:, 0] / parts[:, 1]).sqrt().tolist()
        return first, root, update


def sides(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a first moment, the root of the second, and the update but for its size."""
    root = second.sqrt()
    return first, root, first / (root + 1e-8)


@attrs.define(frozen=True)
class Trained:
    """One run."""

    setup: str
    seed: int
    loss: float
    """On the validation data, in nats, after the last step."""
    bytes_each: tuple[float, float, float]
    """Of weights, of what masters keep beside them, and of moments, per parameter of the model."""
    errors: tuple[float, float, float] | None
    """See :meth:`Shadow.errors`. None where nothing was rounded, or where errors of weights are in the
    momentum too."""


def train(setup: Setup, seed: int, steps: int) -> Trained:
    """Train once."""
    table = ", ".join(f'{key} = "{value}"' for key, value in setup.precision.items())
    overrides = [f"precision={{{table}}}", f"run.seed={seed}", f"run.steps={steps}"]
    overrides.append(f"optimizer.moment_dtype={setup.moments}")
    engine = RuntimeEngine.from_recipe(load_recipe(RECIPE, overrides=overrides))
    optimizer, last = engine.run.optimizer, LastLoss()
    assert isinstance(optimizer, AdamW)
    compared = setup.moments != "float32" and "eco" not in setup.masters
    shadow = Shadow(optimizer) if compared else None
    engine.events.monitors = [*engine.events.monitors, last]
    engine.fit()
    return Trained(setup.name, seed, last.loss, bytes_of(engine.run), shadow and shadow.errors())


def bytes_of(run: Run) -> tuple[float, float, float]:
    """Return the bytes of weights, masters and moments, per parameter."""
    parameters = sum(placed.parameter.numel() for placed in run.placed)
    weights = sum(storage_of(placed.parameter).nbytes for placed in run.placed)
    state = {True: 0, False: 0}
    for block in run.optimizer.blocks():
        state[block.name.startswith((moments.FIRST, moments.SECOND))] += block.tensor.nbytes
    return weights / parameters, state[False] / parameters, state[True] / parameters


HEAD = """\
| precision | bytes: weight | master | moments | in all | errors of moments | validation loss | gap |
|---|---|---|---|---|---|---|---|"""


def table(runs: Sequence[Trained]) -> str:
    """Return the comparison in Markdown."""
    losses = {(run.setup, run.seed): run.loss for run in runs}
    rows = [HEAD]
    for name in dict.fromkeys(run.setup for run in runs):
        mine = [run for run in runs if run.setup == name]
        gap = "" if name == BASELINE.name else compare(mine, losses)
        own = mean(run.loss for run in mine)
        each = mine[0].bytes_each
        held = " | ".join(f"{number:.2f}" for number in (*each, sum(each)))
        rows.append(f"| {name} | {held} | {errors(mine)} | {own:.4f} | {gap} |")
    return "\n".join(rows)


def compare(runs: Sequence[Trained], losses: Mapping[tuple[str, int], float]) -> str:
    """Return the gap to the same seeds with float32 masters and moments."""
    base = [losses[BASELINE.name, run.seed] for run in runs]
    gap = Gap.between([run.loss for run in runs], base)
    return f"{gap.mean:+.4f} ± {gap.error:.4f} ({gap.mean / mean(base):+.2%})"


def errors(runs: Sequence[Trained]) -> str:
    """Return the mean errors of the moments, nothing where there are none."""
    found = [run.errors for run in runs if run.errors]
    return ", ".join(f"{mean(each):.2%}" for each in zip(*found, strict=True))


def main(arguments: Sequence[str] | None = None) -> int:
    """Train everything, print each run as it ends, then the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.masters", description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of a run (default: 300)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each row (default: 3)")
    parser.add_argument("--only", metavar="WORD", default="", help="rows whose name has it, and the first")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="put the table between its markers")
    args = parser.parse_args(arguments)
    log.ensure(0)
    runs = []
    for seed in range(1, args.seeds + 1):
        for setup in (setup for setup in SETUPS if setup == BASELINE or args.only in setup.name):
            runs.append(train(setup, seed, args.steps))
            print(f"{setup.name}, seed {seed}: {runs[-1].loss:.4f}", file=sys.stderr, flush=True)
    print(table(runs))
    if args.markdown:
        write_markdown(args.markdown, table(runs))
    if args.json:
        args.json.write_text(
            json.dumps([attrs.asdict(run) for run in runs], indent=1) + "\n", encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
