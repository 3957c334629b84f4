"""``python -m benchmarks.masters``: validation losses of low-bit master weights beside float32 ones.

Every variant trains the same model on the same tokens from the same weights, once for each seed. The gap is
the mean over seeds of its loss less that of float32 masters with that seed, with its standard error.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev

import attrs
import structlog

from nanotrain_core.contracts import EvaluationReport, Monitor
from nanotrain_core.engine import RuntimeEngine
from nanotrain_core.recipe import load_recipe

RECIPE = Path(__file__).with_name("masters.toml")
BASELINE = "bf16, float32 master"


def fp4_master(form: str, variant: str) -> dict[str, str]:
    """Return the precision table of one variant."""
    return {"use": "fp4_master", "format": form, "variant": variant}


PRECISIONS: Mapping[str, Mapping[str, str]] = {
    BASELINE: {"use": "bf16"},
    **{
        f"{form} {variant}": fp4_master(form, variant)
        for form, variants in {
            "bf16": ("remainder", "residual", "eco", "naive"),
            "nvfp4": ("residual", "eco", "naive"),
            "nf4": ("residual", "eco", "naive"),
        }.items()
        for variant in variants
    },
}


class LastLoss(Monitor):
    """Keeps the loss of the last evaluation."""

    loss = math.nan

    def on_evaluation(self, report: EvaluationReport) -> None:
        """Keep it."""
        self.loss = report.loss


@attrs.define(frozen=True)
class Trained:
    """One run."""

    precision: str
    seed: int
    loss: float
    """On the validation data, in nats, after the last step."""
    bytes_each: float
    """Of weight, master and moments, per parameter of the model."""


def train(name: str, seed: int, steps: int) -> Trained:
    """Train once."""
    table = ", ".join(f'{key} = "{value}"' for key, value in PRECISIONS[name].items())
    overrides = [f"precision={{{table}}}", f"run.seed={seed}", f"run.steps={steps}"]
    engine = RuntimeEngine.from_recipe(load_recipe(RECIPE, overrides=overrides))
    last = LastLoss()
    engine.events.monitors = [*engine.events.monitors, last]
    engine.fit()
    weights = [placed.parameter for placed in engine.run.placed]
    held = sum(w.nbytes for w in weights) + sum(b.tensor.nbytes for b in engine.run.optimizer.blocks())
    return Trained(name, seed, last.loss, held / sum(w.numel() for w in weights))


def table(runs: Sequence[Trained]) -> str:
    """Return the comparison in Markdown."""
    losses = {(run.precision, run.seed): run.loss for run in runs}
    seeds = sorted({run.seed for run in runs})
    rows = [
        "| precision | bytes per parameter | validation loss | gap to the float32 master |",
        "|---|---|---|---|",
    ]
    for name in dict.fromkeys(run.precision for run in runs):
        own = [losses[name, seed] for seed in seeds if (name, seed) in losses]
        gaps = [losses[name, seed] - losses[BASELINE, seed] for seed in seeds if (name, seed) in losses]
        base = [losses[BASELINE, seed] for seed in seeds if (name, seed) in losses]
        error = stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
        each = next(run.bytes_each for run in runs if run.precision == name)
        gap = "" if name == BASELINE else f"{mean(gaps):+.4f} ± {error:.4f} ({mean(gaps) / mean(base):+.2%})"
        rows.append(f"| {name} | {each:.2f} | {mean(own):.4f} | {gap} |")
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train everything, print each run as it ends, then the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.masters", description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of a run (default: 300)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each precision (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run")
    args = parser.parse_args(arguments)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    runs = []
    for seed in range(1, args.seeds + 1):
        for name in PRECISIONS:
            runs.append(train(name, seed, args.steps))
            print(f"{name}, seed {seed}: {runs[-1].loss:.4f}", file=sys.stderr, flush=True)
    print(table(runs))
    if args.json:
        args.json.write_text(
            json.dumps([attrs.asdict(run) for run in runs], indent=1) + "\n", encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
