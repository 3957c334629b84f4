"""Speeds of a run whose sequences grow between two logged steps."""

import pytest

from nanotrain_core.contracts import Monitor
from nanotrain_core.testing import Case
from nanotrain_core.testing.probe import make_engine

PHASES = [{"until_tokens": 2 * 12 * 8}, {"batch": {"sequences": 4, "length": 16}}]


class Told(Monitor):
    """Keeps the metrics and the FLOPs of a token in logged steps."""

    def on_start(self, run):
        self.flops, self.told = [], {}

    def on_step(self, report):
        self.flops.append(report.flops_per_token)

    def on_metrics(self, report):
        self.told[report.step] = report.values


def run(log_every):
    told = Told()
    changes = {
        "run": {"steps": 4, "log_every": log_every},
        "batch": {"sequences": 12, "microbatch": 2, "length": 8},
        "evaluation": {"sequences": 0},
        "phase": PHASES,
    }
    case = Case("monitor", use="throughput", config={"peak_tflops": 2.0})
    make_engine(case, changes, callbacks=[told]).fit()
    return told


def test_speeds_are_of_the_sequences_and_flops_of_every_step():
    """They were those of the last step's length: 25% too low in an interval with two lengths."""
    short, long = run(log_every=1).flops[::3]
    assert short < long
    told = run(log_every=4).told[4]
    steps = told["speed/steps_per_second"]
    assert told["tokens_per_second"] / steps == pytest.approx((2 * 12 * 8 + 2 * 4 * 16) / 4)
    assert told["speed/samples_per_second"] / steps == pytest.approx((2 * 12 + 2 * 4) / 4)
    flops = (2 * 12 * 8 * short + 2 * 4 * 16 * long) / 4
    assert told["speed/tflops"] / steps == pytest.approx(flops / 1e12)
    assert told["speed/mfu"] == pytest.approx(told["speed/tflops"] / 2.0)
