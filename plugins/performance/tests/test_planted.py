"""Planted troubles break a declared rule within 20 steps; a run without any breaks none."""

from types import SimpleNamespace

import numpy
import pytest
from machine_troubles import growing_memory, nothing, slow_data, slow_rank
from nanotrain_performance import ThroughputConfig, declared
from nanotrain_performance.throughput import Throughput

from nanotrain_core.contracts import Monitor
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import make_engine

USED = [{"use": use} for use in ("throughput", "memory", "pipeline", "goodput")]
DP = Case("monitor", use="throughput", topology={"dp": 2}, overrides={"parallel": [{"use": "summed"}]})
#: Rules about the machine that a test runs on, not about the run.
OF_THE_MACHINE = {"memory/host_fraction", "time/step/over_median", "pipeline/skew"}


class Verdicts(Monitor):
    """Keeps the first step in which each metric was not good."""

    def __init__(self):
        self.broken = {}

    def on_metrics(self, report):
        for name, value in report.values.items():
            rule = report.metrics[name].rule
            if rule is not None and name in report.published and rule.judge(value) != "good":
                self.broken.setdefault(name, report.step)


def broken_rules(plant, amount):
    verdicts = Verdicts()
    engine = make_engine(DP, {"run": {"steps": 20}, "monitor": USED}, callbacks=[verdicts])
    plant(engine, amount)
    engine.fit()
    return verdicts.broken


@pytest.mark.parametrize(
    ("plant", "amount", "metric", "says"),
    [
        (slow_data, 0.15, "time/data_fraction", "input-bound"),
        (slow_rank, 0.12, "pipeline/skew", "one rank computes for over twice as long"),
        (growing_memory, 2**21, "memory/host_growth/max", "something keeps tensors"),
    ],
    ids=["slow-data", "slow-rank", "growing-memory"],
)
def test_a_planted_trouble_is_named_within_20_steps(plant, amount, metric, says):
    for broken in run_ranks(broken_rules, 2, plant, amount):
        assert broken.keys() - OF_THE_MACHINE == {metric} - OF_THE_MACHINE
        assert metric in broken
    rule = next(
        each.rule for each in declared.THROUGHPUT + declared.MEMORY + declared.PIPELINE if each.name == metric
    )
    assert says in rule.high


def test_a_healthy_run_breaks_no_rule():
    for broken in run_ranks(broken_rules, 2, nothing, 0):
        assert broken.keys() <= OF_THE_MACHINE


@pytest.mark.parametrize(
    ("last", "verdict"), [([9.0, 1.0, 9.0], "good"), ([2.5, 9.0, 2.1], "warn"), ([2.5], "good")]
)
def test_steps_are_slow_once_three_in_a_row_take_twice_the_median(last, verdict):
    told = {}
    monitor = Throughput(ThroughputConfig())
    monitor.window.extend([1.0] * 20 + last)
    monitor.run = SimpleNamespace(metrics=SimpleNamespace(scalar=told.__setitem__))
    monitor._steps()
    rule = next(each.rule for each in declared.THROUGHPUT if each.name == "time/step/over_median")
    assert rule.judge(told["time/step/over_median"]) == verdict
    assert told["time/step/p50"] == 1.0
    assert told["time/step/p95"] == pytest.approx(numpy.percentile([1.0] * 20 + last, 95))
