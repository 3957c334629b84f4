"""The gradient sync has complete gradients when monitors look, not only when the optimizer does."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from nanotrain_core.testing.case import Case
from nanotrain_core.testing.checks import check
from nanotrain_core.testing.compare import EXACT, assert_numbers, assert_same, whole
from nanotrain_core.testing.pool import run_ranks
from nanotrain_core.testing.probe import Trace, train


@check("optimizer", since="0.2")
@check("parallel", since="0.2")
def monitors_see_gradients(case: Case) -> None:
    """Before an update a monitor is offered the gradients and norms of one process, by name, to 1e-10.

    Where some weights are narrower than float64, to 1e-5 of them, as sums in another order allow.
    """
    changes = {"run": {"steps": 2}}
    ranks: list[Trace] = run_ranks(train, case.world_size, case, changes, watch_gradients=True)
    (alone,) = run_ranks(train, 1, case.alone(), changes, watch_gradients=True)
    atol, rtol = tolerances(alone)
    offered = whole([t.offered for t in ranks], atol=max(atol / 10, 1e-12))
    assert_same(offered, whole([alone.offered]), "gradients offered to monitors", atol=atol, rtol=rtol)
    for rank, trace in enumerate(ranks):
        for step, (norms, expected) in enumerate(zip(trace.norms, alone.norms, strict=True), 1):
            what = f"rank {rank}, step {step}"
            assert list(norms) == list(expected), f"{what}: norms of {list(norms)}, expected {list(expected)}"
            total = math.sqrt(sum(norm**2 for norm in norms.values()))
            assert_numbers([total], [trace.reports[step - 1].grad_norm], f"{what}: global norm", atol=atol)
            try:
                assert_same(_tensors(norms), _tensors(expected), f"{what}: norms by name", atol=atol)
            except AssertionError as error:
                if step == 1:
                    raise
                hint = "the norms of step 1 are right: did that step change weights as one process does?"
                raise AssertionError(f"{error}; {hint}") from None


def _tensors(norms: Mapping[str, float]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(norm, dtype=torch.float64) for name, norm in norms.items()}


def tolerances(trace: Trace) -> tuple[float, float]:
    """Return the absolute and relative tolerance of gradients, by the run's lowest-precision weight."""
    exact = all(block.tensor.dtype == torch.float64 for block in trace.weights)
    return (EXACT, 0.0) if exact else (1e-5, 1e-5)
