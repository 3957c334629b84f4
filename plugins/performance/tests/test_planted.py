"""Planted troubles break a declared rule within 20 steps; a run without any breaks none."""

import mmap
import time
from types import SimpleNamespace

import numpy
import pytest
import torch
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


def slow_data(engine):
    take = engine.run.feed.data.train_batch
    engine.run.feed.data.train_batch = lambda *args: (time.sleep(0.15), take(*args))[1]


def slow_rank(engine):
    if engine.run.mesh.rank == 1:
        for part in engine.run.stages.values():
            part.register_forward_pre_hook(lambda *_: time.sleep(0.03))


def fresh(size):
    """Return a tensor of memory that no allocator had before: each page of it is new to the process."""
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8).fill_(1)


def keeps_tensors(engine):
    kept = []
    if engine.run.mesh.rank == 1:
        for part in engine.run.stages.values():
            part.register_forward_hook(lambda *_: kept.append(fresh(2**21)))  # twice a step


def nothing(engine):
    pass


def broken_rules(plant):
    verdicts = Verdicts()
    engine = make_engine(DP, {"run": {"steps": 20}, "monitor": USED}, callbacks=[verdicts])
    plant(engine)
    engine.fit()
    return verdicts.broken


@pytest.mark.parametrize(
    ("plant", "metric", "says"),
    [
        (slow_data, "time/data_fraction", "input-bound"),
        (slow_rank, "pipeline/skew", "one rank computes for over twice as long"),
        (keeps_tensors, "memory/host_growth/max", "something keeps tensors"),
    ],
    ids=["slow-data", "slow-rank", "growing-memory"],
)
def test_a_planted_trouble_is_named_within_20_steps(plant, metric, says):
    for broken in run_ranks(broken_rules, 2, plant):
        assert broken.keys() - OF_THE_MACHINE == {metric} - OF_THE_MACHINE
        assert metric in broken
    rule = next(
        each.rule for each in declared.THROUGHPUT + declared.MEMORY + declared.PIPELINE if each.name == metric
    )
    assert says in rule.high


def test_a_healthy_run_breaks_no_rule():
    for broken in run_ranks(broken_rules, 2, nothing):
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
