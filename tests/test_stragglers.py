"""Who makes the others wait is told from where each rank spends its time."""

import time

import pytest
from structlog.testing import capture_logs

from nanotrain_core.monitors.stragglers import slowest
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import make_engine


@pytest.mark.parametrize(
    ("data", "found"),
    [
        ([0.1, 0.1, 0.1, 0.3], (3, "data")),
        ([0.1, 0.3], (1, "data")),
        ([0.1, 0.15, 0.12, 0.1], None),
        ([0.001, 0.004], None),
    ],
)
def test_a_rank_far_above_the_median_is_slow(data, found):
    assert slowest([{"data": seconds, "monitors": 0.01} for seconds in data], 2.0, 0.01) == found


def slow_data(case, slow):
    monitor = {"use": "stragglers", "every": 2, "patience": 2, "least": 0.1}
    engine = make_engine(case, {"run": {"steps": 8}, "monitor": [monitor]})
    take = engine.run.feed.data.train_batch

    def slowly(*arguments):
        if engine.run.mesh.rank == slow:
            time.sleep(0.3)
        return take(*arguments)

    engine.run.feed.data.train_batch = slowly
    with capture_logs() as logs:
        engine.fit()
    return [entry["event"] for entry in logs]


def test_the_slow_rank_is_named_once_by_rank_0():
    said = run_ranks(slow_data, 2, Case("parallel", use="ddp", topology={"dp": 2}), 1)
    assert said == [["rank 1 is slow: others wait for its data"], []]
