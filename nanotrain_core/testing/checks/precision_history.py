"""What a precision keeps over steps follows the steps of training alone."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import attrs
import torch

from nanotrain_core.testing.case import Case
from nanotrain_core.testing.checks import check
from nanotrain_core.testing.checks.optimizer import whole_of
from nanotrain_core.testing.checks.precision import ADAMW
from nanotrain_core.testing.compare import assert_bitwise
from nanotrain_core.testing.pool import run_ranks
from nanotrain_core.testing.probe import SaveAt, Trace, copies, make_engine, train, weights


@check("precision", since="0.2")
def evaluation_changes_nothing(case: Case) -> None:
    """Weights, masters and loss scale after 4 steps are bitwise the same with validation after each step."""
    changes: dict[str, Any] = {
        "run": {"steps": 4},
        "optimizer": case.overrides.get("optimizer", ADAMW),
        "evaluation": {"sequences": 0},
    }
    alone: list[Trace] = run_ranks(train, case.world_size, case, changes)
    changes["evaluation"] = {"sequences": 8, "every": 1}
    evaluated: list[Trace] = run_ranks(train, case.world_size, case, changes)
    for rank, (one, other) in enumerate(zip(alone, evaluated, strict=True)):
        what = f"rank {rank}, with validation after each of 4 steps: do statistics ask passes.counted?"
        assert_bitwise(whole_of(other), whole_of(one), what)
        got, want = other.meta["scale"], one.meta["scale"]
        assert got == want, f"{what} The loss scale has {got}, without validation {want}"


@check("precision", since="0.2")
def going_back_is_bit_equal(case: Case) -> None:
    """Of 4 steps with validation after each, the last 2 are the same after a rollback in the process."""
    with tempfile.TemporaryDirectory() as name:
        ranks = run_ranks(there_and_back, case.world_size, case, Path(name))
    for rank, (first, again) in enumerate(ranks):
        what = f"rank {rank}, back from step 4 to 2: does what is kept of weights go by weights_version?"
        assert_bitwise(again, first, what)


def there_and_back(case: Case, folder: Path) -> list[dict[str, torch.Tensor]]:
    """Return this rank's weights and state after all steps, and after the last 2 a second time."""
    changes: dict[str, Any] = {
        "run": {"steps": 4},
        "optimizer": case.overrides.get("optimizer", ADAMW),
        "evaluation": {"sequences": 8, "every": 1},
    }
    engine = make_engine(case, changes, folder=folder)
    run = engine.run = attrs.evolve(engine.run, checkpoint=SaveAt(engine.run.checkpoint, 2))
    found = []
    for again in (False, True):
        if again:
            engine.load("2")
        engine.fit()
        blocks = [*weights(run), *copies(run.optimizer.blocks())]
        found.append({f"{block.name}@{block.offset}": block.tensor for block in blocks})
    return found
