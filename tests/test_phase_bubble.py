"""The ``pipeline`` monitor of a run whose phases change the number of microbatches."""

import pytest

from nanotrain_core.contracts import Monitor
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import make_engine, rank

LENGTH = 8
#: Two steps of 2 sequences, and two of 6.
PHASES = [
    {"until_tokens": 2 * 2 * LENGTH, "batch": {"sequences": 2}},
    {"batch": {"sequences": 6}},
]


class Ideals(Monitor):
    def __init__(self):
        self.told = {}

    def on_metrics(self, report):
        if report.published:
            self.told[report.step] = report.values[f"pipeline/bubble/ideal/rank-{rank()}"]


def ideals(case):
    seen = Ideals()
    engine = make_engine(case, {"run": {"steps": 4, "log_every": 1}, "phase": PHASES}, callbacks=[seen])
    engine.fit()
    return seen.told


def test_the_ideal_bubble_is_that_of_the_phase():
    overrides = {
        "batch": {"sequences": 2, "microbatch": 1, "length": LENGTH},
        "model": {"layers": 2},
        "schedule": {"use": "1f1b"},
        "monitor": [{"use": "pipeline"}],
    }
    case = Case("topology", use="grid", topology={"pp": 2}, overrides=overrides)
    few, many = (1 / (microbatches + 1) for microbatches in (2, 6))  # (p - 1) / (m + p - 1)
    for told in run_ranks(ideals, 2, case):
        assert told == pytest.approx({1: few, 2: few, 3: many, 4: many})
