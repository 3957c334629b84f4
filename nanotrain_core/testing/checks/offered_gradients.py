"""Who owns gradients has them complete when monitors look, not only when the optimizer does."""

from __future__ import annotations

import math

from nanotrain_core.testing.case import Case
from nanotrain_core.testing.checks import check
from nanotrain_core.testing.compare import EXACT, assert_numbers, assert_same, whole
from nanotrain_core.testing.pool import run_ranks
from nanotrain_core.testing.probe import Trace, train


@check("optimizer", since="0.2")
@check("parallel", since="0.2")
def monitors_see_gradients(case: Case) -> None:
    """Before an update a monitor is offered the gradients and norms of one process, by name, to 1e-10."""
    changes = {"run": {"steps": 2}}
    ranks: list[Trace] = run_ranks(train, case.world_size, case, changes, watch_gradients=True)
    (alone,) = run_ranks(train, 1, case.alone(), changes, watch_gradients=True)
    assert_same(whole([t.offered for t in ranks]), whole([alone.offered]), "gradients offered to monitors")
    for rank, trace in enumerate(ranks):
        for step, (norms, expected) in enumerate(zip(trace.norms, alone.norms, strict=True), 1):
            what = f"rank {rank}, step {step}"
            assert list(norms) == list(expected), f"{what}: norms of {list(norms)}, expected {list(expected)}"
            assert_numbers([*norms.values()], [*expected.values()], f"{what}: norms by name", atol=EXACT)
            total = math.sqrt(sum(norm**2 for norm in norms.values()))
            assert_numbers([total], [trace.reports[step - 1].grad_norm], f"{what}: global norm", atol=EXACT)
