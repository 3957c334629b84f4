"""A wrapper is right with any number of microbatches, in every step, and with several dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nanotrain_core.testing.altered import train_with_extra
from nanotrain_core.testing.case import Case
from nanotrain_core.testing.checks import check, syncs, trains_the_model
from nanotrain_core.testing.checks.parallel import ADAMW, assert_same_reports, one_process, traces
from nanotrain_core.testing.compare import EXACT, assert_same, whole
from nanotrain_core.testing.pool import run_ranks
from nanotrain_core.testing.probe import Trace

#: Of each data-parallel rank: one, an odd number, and more than any buffer may count on.
COUNTS = (1, 3, 17)


@check("parallel", since="0.2")
@check("optimizer", since="0.2", applies=syncs)
def any_number_of_microbatches(case: Case) -> None:
    """With 1, 3 and 17 microbatches a rank, gradients and weights are those of one process."""
    shards = case.topology.get("dp", 1)
    for count in COUNTS:
        sequences = count * shards
        changes: dict[str, Any] = {"run": {"steps": 2}, "batch": {"sequences": sequences, "microbatch": 1}}
        data = case.tables()["data"]
        if data["use"] == "synthetic":  # as many as a batch takes
            changes["data"] = {"sequences": max(data["sequences"], sequences)}
        ranks = traces(case, **changes)
        alone_in = {**changes, "batch": {"sequences": sequences, "microbatch": sequences}}
        alone = one_process(case, **alone_in)
        what = f"with {count} microbatches on each rank"
        assert_same(whole([t.gradients for t in ranks]), whole([alone.gradients]), f"gradients {what}")
        assert_same(
            whole([t.weights for t in ranks]), whole([alone.weights]), f"weights after 2 steps {what}"
        )


@check("parallel", since="0.2")
def twenty_steps_are_those_of_one_process(case: Case) -> None:
    """After 20 clipped steps, past the end of the data's first epoch, losses and weights agree to 1e-7.

    A model may amplify rounding: 30 times as much is allowed as one process differs by when it adds up
    microbatches of one sequence, at most 1e-3.
    """
    changes: dict[str, Any] = {"optimizer": ADAMW, "run": {"steps": 20}}
    ranks, alone = traces(case, **changes), one_process(case, **changes)
    try:
        _assert_alike(ranks, alone, 1e-7)
    except AssertionError:
        rounding = _difference(one_process(case, **changes, batch={"microbatch": 1}), alone)
        if not 30 * rounding > 1e-7:
            raise
        _assert_alike(ranks, alone, min(30 * rounding, 1e-3))


def _assert_alike(ranks: Sequence[Trace], alone: Trace, atol: float) -> None:
    for trace in ranks:
        assert_same_reports(trace, alone, atol=atol)
    found, expected = whole([t.weights for t in ranks]), whole([alone.weights])
    assert_same(found, expected, "weights after 20 steps", atol=atol)


def _difference(one: Trace, other: Trace) -> float:
    """Return the largest difference of a loss, norm or weight between two runs of one process."""
    pairs = list(zip(one.reports, other.reports, strict=True))
    told = [max(abs(a.loss - b.loss), abs(a.grad_norm - b.grad_norm)) for a, b in pairs]
    mine, others = whole([one.weights]), whole([other.weights])
    return max(*told, *((mine[name] - others[name]).abs().max().item() for name in mine))


def _data_parallel_alone(case: Case) -> bool:
    """Return whether each rank has the whole model: one more parameter's loss is summed over data alone."""
    return all(degree == 1 or dim == "dp" for dim, degree in case.topology.items())


@check(
    "parallel",
    since="0.2",
    applies=lambda case: trains_the_model(case) and _data_parallel_alone(case),
    variants=("from_the_second_step", "in_the_first_step"),
)
@check(
    "optimizer",
    since="0.2",
    applies=lambda case: syncs(case) and _data_parallel_alone(case),
    variants=("from_the_second_step", "in_the_first_step"),
)
def a_parameter_may_be_used_later(case: Case, used: str) -> None:
    """A parameter that no rank uses in the first step, or in later ones, has its gradient in the others."""
    changes: dict[str, Any] = {"run": {"steps": 4}}
    ranks = run_ranks(train_with_extra, case.world_size, case, changes, used)
    (alone,) = run_ranks(train_with_extra, 1, case.alone(), changes, used)
    (unused,) = run_ranks(train_with_extra, 1, case.alone(), changes, "nowhere")
    found, never = whole([t.weights for t in ranks]), whole([unused.weights])
    assert_same(found, whole([alone.weights]), "weights after 4 steps", atol=EXACT)
    for name in (name for name in never if name.startswith("extra_")):  # one process has the fault as well
        assert not torch.equal(found[name], never[name]), f"{name} is as if it had never been used"


@check("parallel", since="0.2")
def mixed_dtypes(case: Case) -> None:
    """Gradients are right with matrices in float32 and vectors in float64, to 1e-5 of them."""
    changes: dict[str, Any] = {"precision": {"use": "wide_norms"}, "run": {"steps": 1}}
    ranks, alone = traces(case, **changes), one_process(case, **changes)
    got, want = whole([t.gradients for t in ranks], atol=1e-6), whole([alone.gradients])
    assert_same(got, want, "gradients", atol=1e-6, rtol=1e-5)
