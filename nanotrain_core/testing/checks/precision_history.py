"""What a precision keeps over steps follows the steps of training alone."""

from __future__ import annotations

from typing import Any

from nanotrain_core.testing.case import Case
from nanotrain_core.testing.checks import check
from nanotrain_core.testing.checks.optimizer import whole_of
from nanotrain_core.testing.checks.precision import ADAMW
from nanotrain_core.testing.compare import assert_bitwise
from nanotrain_core.testing.pool import run_ranks
from nanotrain_core.testing.probe import Trace, train


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
