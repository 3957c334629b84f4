"""Gradients offered to monitors before an update: without the loss scale, and free if nobody asks."""

import math
from itertools import pairwise

import pytest

from nanotrain_core.contracts import Monitor
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.collectives import CollectiveLog
from nanotrain_core.testing.probe import Reports, make_engine, train

SYNCS = {
    "ddp": Case("parallel", use="ddp", topology={"dp": 2}),
    "zero1": Case("optimizer", use="zero12", config={"stage": 1, "bucket_mb": 0.01}, topology={"dp": 2}),
    "zero2": Case("optimizer", use="zero12", config={"stage": 2, "bucket_mb": 0.01}, topology={"dp": 2}),
}


@pytest.mark.full_cases("zero1")
@pytest.mark.parametrize("case", SYNCS.values(), ids=SYNCS)
def test_the_loss_scale_is_divided_out_and_a_step_that_is_skipped_shows_why(case):
    """The first scales are too large for float16: norms are then infinite, or NaN, on all ranks alike."""
    changes = {"precision": {"use": "fp16", "initial_scale": 2.0**24}, "run": {"steps": 16}}
    ranks = run_ranks(train, 2, case, changes, watch_gradients=True)
    skipped = [report.skipped for report in ranks[0].reports]
    assert skipped[0]
    assert not skipped[-1]
    assert len({report.loss_scale for report in ranks[0].reports}) > 2
    for trace in ranks:
        assert [*map(str, trace.norms)] == [*map(str, ranks[0].norms)]  # nan is not itself
        for report, norms in zip(trace.reports, trace.norms, strict=True):
            total = math.sqrt(sum(norm**2 for norm in norms.values()))
            assert math.isfinite(total) is not report.skipped
            assert report.skipped or total == pytest.approx(report.grad_norm, rel=1e-5)


class Counts(Monitor):
    """Counts the collectives that were called until each update, and asks for norms in the steps given."""

    def __init__(self, log, asks):
        self.log, self.asks, self.called = log, asks, []

    def on_before_update(self, update):
        if update.step in self.asks:
            update.norms()
        self.called.append(len(self.log.entries))


def collectives(case, asks):
    """Return the number of collectives of each step but the first."""
    engine, log = make_engine(case, {"run": {"steps": 5}}), CollectiveLog()
    counts = Counts(log, asks)
    engine.events.monitors = [counts, Reports()]
    with log:
        engine.fit()
    return [after - before for before, after in pairwise(counts.called)]


def test_norms_are_one_collective_after_an_agreement_and_nothing_is_sent_if_nobody_asks():
    options = {"check_collectives": True}  # through the process group, where they are seen
    quiet, _ = run_ranks(collectives, 2, SYNCS["ddp"], (), **options)
    asking, _ = run_ranks(collectives, 2, SYNCS["ddp"], (1, 3, 5), **options)
    assert [a - q for a, q in zip(asking, quiet, strict=True)] == [0, 2, 0, 2]
