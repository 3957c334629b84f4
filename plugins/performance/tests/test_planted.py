"""Planted troubles break a declared rule within 20 steps; a run without any breaks none."""

import json
from types import SimpleNamespace

import numpy
import pytest
from machine_troubles import growing_memory, nothing, slow_data, slow_rank
from nanotrain_performance import ThroughputConfig, declared
from nanotrain_performance.throughput import Throughput

from nanotrain_core.api.torch import MetricsReport
from nanotrain_core.contracts import Monitor
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import make_engine

USED = [{"use": use} for use in ("throughput", "memory", "pipeline", "goodput")]
DP = Case("monitor", use="throughput", topology={"dp": 2}, overrides={"parallel": [{"use": "summed"}]})
#: Rules about the machine that a test runs on, not about the run: a step takes a few milliseconds, so that a
#: process that waits for a core while it reads data has waited for a large part of one.
OF_THE_MACHINE = {"memory/host_fraction", "time/step/over_median", "time/data_fraction", "pipeline/skew"}


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
        pytest.param(
            *(slow_data, 0.15, "time/data_fraction", "input-bound"), id="slow-data", marks=pytest.mark.full
        ),
        pytest.param(
            *(slow_rank, 0.12, "pipeline/skew", "one rank computes for over twice as long"), id="slow-rank"
        ),
        pytest.param(
            *(growing_memory, 2**21, "memory/host_growth/max", "something keeps tensors"),
            id="growing-memory",
            marks=pytest.mark.full,
        ),
    ],
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
    monitor.run = SimpleNamespace(metrics=SimpleNamespace(scalar=told.__setitem__), world_size=2)
    monitor.tokens, monitor.since = 64, 1
    monitor._steps()
    told |= monitor.derive(MetricsReport(23, told))
    rule = next(each.rule for each in declared.THROUGHPUT if each.name == "time/step/over_median")
    assert rule.judge(told["time/step/over_median"]) == verdict
    assert told["time/step/p50"] == 1.0
    assert told["time/step/p95"] == pytest.approx(numpy.percentile([1.0] * 20 + last, 95))


class Clock:
    """A monitor whose steps take the time that it is told."""

    def __init__(self, monkeypatch, ranks=2):
        self.now, self.step = 0.0, 0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)
        self.begin(ranks)

    def begin(self, ranks):
        told = self.told = {}
        self.monitor = Throughput(ThroughputConfig())
        self.monitor.on_start(
            SimpleNamespace(
                metrics=SimpleNamespace(scalar=told.__setitem__),
                world_size=ranks,
                device=SimpleNamespace(type="cpu"),
                progress=SimpleNamespace(time_device=lambda device: None, measured=dict, spent={}),
            )
        )

    def resume(self, ranks):
        meta = json.loads(json.dumps(self.monitor.meta()))
        self.begin(ranks)
        if meta:
            self.monitor.load_meta(meta)

    def steps(self, count, seconds, tokens=64):
        """Return how many times as long as usual steps take, from the first one that is compared."""
        found = []
        for _ in range(count):
            self.now, self.step = self.now + seconds, self.step + 1
            self.told.clear()
            self.monitor.on_before_update(SimpleNamespace(tokens=tokens, count={}.get, step=self.step))
            self.monitor._steps()
            derived = self.monitor.derive(MetricsReport(self.step, self.told))
            found += derived.values()
        return found


def test_steps_that_stay_slow_are_slow_until_they_are_not(monkeypatch):
    """The median had slid along: after some 50 steps they were usual."""
    clock = Clock(monkeypatch)
    assert clock.steps(60, 1.0) == [1.0] * 50
    assert clock.steps(300, 3.0) == [1.0] * 2 + [3.0] * 298
    clock.resume(ranks=2)
    assert clock.steps(40, 3.0) == [3.0] * 30
    assert clock.steps(20, 1.0)[-1] < 1.0
    assert clock.monitor.meta() == {}
    assert clock.steps(100, 1.0)[-1] == 1.0


def test_slow_steps_of_fewer_ranks_or_another_batch_are_judged_anew(monkeypatch):
    clock = Clock(monkeypatch)
    clock.steps(60, 1.0)
    assert clock.steps(9, 3.0)[-1] == 3.0
    clock.resume(ranks=1)
    assert clock.steps(20, 3.0) == [1.0] * 10
    assert clock.steps(9, 9.0)[-1] == 3.0
    assert clock.steps(30, 27.0, tokens=256) == [1.0] * 20
