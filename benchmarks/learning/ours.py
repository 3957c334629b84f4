"""Our side: ``nanotrain run``, as a user starts it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.learning.records import Finished, Plan, twentieths
from benchmarks.report import machine
from nanotrain_core.contracts import Data
from nanotrain_core.errors import DataError
from nanotrain_core.metrics.history import read_metrics
from nanotrain_core.recipe import load_recipe
from nanotrain_core.recipe.tree import Recipe
from nanotrain_core.registry.registry import load_plugins


def recipe_of(plan: Plan) -> Recipe:
    """Return what a run trains."""
    return load_recipe(Path(plan.recipe), overrides=[*plan.changes, f"run.seed={plan.seed}"])


def opened(recipe: Recipe) -> Data:
    """Return the recipe's data.

    Raises:
        DataError: a run would read some of it twice.
    """
    data: Any = load_plugins().get("data", recipe.data.use).build(recipe.data.config)
    data.open(length=recipe.batch.length, seed=recipe.run.seed)
    wanted = recipe.batch.sequences * recipe.run.steps
    if wanted > data.train:
        raise DataError(
            f"{recipe.run.steps} steps read {wanted} sequences, but there are {data.train} to train on"
        )
    return data  # type: ignore[no-any-return]


def train(plan: Plan, recipe: Recipe, data: Data, folder: Path) -> Finished:
    """Run the command, whose run folder is ``folder``, and read what it wrote."""
    changes = [word for change in plan.changes for word in ("--set", change)]
    own = ["--set", f"run.seed={plan.seed}", "--folder", str(folder)]
    command = [sys.executable, "-m", "nanotrain_core.cli", "run", plan.recipe, *changes, *own]
    began = time.perf_counter()
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    if ended.returncode:
        raise RuntimeError(f"nanotrain ended with {ended.returncode}: {ended.stderr[-2000:]}")
    history = read_metrics(folder, ["loss", "validation/loss", "tokens_per_second"])
    curves, reads = history.curves, data
    validation = tuple(curves["validation/loss"])
    return Finished(
        plan=plan,
        model=f"{history.start['parameters'] / 1e6:.2f} million parameters",
        text=data.describe(),
        steps=recipe.run.steps,
        tokens=recipe.run.steps * recipe.batch.sequences * recipe.batch.length,
        training=twentieths(list(curves["loss"].values)),
        validation=validation,
        held_out=validation[-1][1],
        held_out_tokens=recipe.evaluation.sequences * recipe.batch.length,
        bytes_per_token=reads.bytes_per_token or float("nan"),
        tokens_per_second=median(curves["tokens_per_second"].values),
        seconds=round(seconds, 1),
        machine=machine(),
    )
