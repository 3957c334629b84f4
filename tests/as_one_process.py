"""Hold a case on its ranks to the same case in one process: gradients, weights, loss terms and norms."""

from nanotrain_core.testing import run_ranks
from nanotrain_core.testing.compare import assert_numbers, assert_same, whole
from nanotrain_core.testing.probe import train

#: Of float64, after three steps.
TOLERANCE = 1e-9


def assert_trains_as_one_process(case, alone=None):
    """``alone``: the case of one process, by default without wrappers."""
    ranks = run_ranks(train, case.world_size, case, {})
    (alone,) = run_ranks(train, 1, alone or case.alone(), {})
    for part in ("gradients", "weights"):
        found = whole([getattr(trace, part) for trace in ranks], atol=TOLERANCE)
        assert_same(found, whole([getattr(alone, part)]), part, atol=TOLERANCE)
    for rank, trace in enumerate(ranks):
        got, want = (
            [n for r in t.reports for n in (r.loss, r.grad_norm, *r.losses.values())] for t in (trace, alone)
        )
        assert_numbers(got, want, f"rank {rank}: loss terms and norm", atol=TOLERANCE)
