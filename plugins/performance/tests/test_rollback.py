"""Seconds are those since the last logged step; after a rollback, of steps that are kept."""

from types import SimpleNamespace

import pytest
import torch
from nanotrain_performance import ThroughputConfig
from nanotrain_performance.throughput import Throughput

from nanotrain_core.contracts import RollbackReport
from nanotrain_core.watch.progress import TimeSpent


class Works:
    """A progress in which each step takes two seconds of work and one of data."""

    def __init__(self):
        self.spent = {}

    def time_device(self, device):
        pass

    def step(self):
        self.pass_time("forward and backward", 2.0)
        self.pass_time("data", 1.0)

    def pass_time(self, part, seconds):
        self.spent[part] = TimeSpent(self.spent.get(part, TimeSpent()).seconds + seconds)

    def measured(self):
        return dict(self.spent)


#: Of a logged step.
REPORT = {
    "step": 1,
    "seconds": 3.0,
    "tokens_per_second": 16 / 3,
    "sequences_per_second": 0.5,
    "flops_per_token": 0.0,
}


def started(progress, told):
    monitor = Throughput(ThroughputConfig())
    monitor.on_start(
        SimpleNamespace(
            first_step=0,
            steps=30,
            device=torch.device("cpu"),
            progress=progress,
            metrics=SimpleNamespace(scalar=told.__setitem__),
            world_size=1,
            recipe=None,
            flops_per_token=0.0,
        )
    )
    return monitor


def test_saves_and_evaluations_are_told_in_seconds_since_the_last_logged_step_and_are_in_no_step():
    told, progress = {}, Works()
    monitor, report = started(progress, told), SimpleNamespace(**REPORT)
    for evaluation, checkpoint in ((0.0, 0.0), (0.5, 4.0), (0.25, 0.0)):
        progress.pass_time("evaluation", evaluation)
        for _ in range(4):
            progress.step()
            progress.pass_time("checkpoint", checkpoint / 4)
            monitor.on_before_update(SimpleNamespace(tokens=16, step=1, count=lambda term: None))
        monitor.on_step(report)
        assert told["time/evaluation"] == evaluation
        assert told["time/checkpoint"] == checkpoint
        assert (told["time/forward_backward"], told["time/data"]) == (2.0, 1.0)


def test_effective_tokens_are_a_share_of_the_rate_whose_interval_an_evaluation_shortens():
    """None is ignored, so both rates are one; the interval is the last step's, which has most tokens."""
    told, progress = {}, Works()
    monitor = started(progress, told)
    for step, tokens in enumerate((16, 16, 32), start=1):
        progress.step()
        counts = {"lm": torch.tensor(float(tokens))}
        monitor.on_before_update(SimpleNamespace(tokens=tokens, step=step, count=counts.get))
    rate = {"seconds": 2.0, "tokens_per_second": 16.0}
    monitor.on_step(SimpleNamespace(**{**REPORT, "step": 3, **rate}))
    assert float(told["speed/effective_tokens_per_second"]) == 16.0


def test_seconds_of_a_step_are_those_of_steps_since_the_last_logged_or_the_rollback():
    """From 23 back to 10, logged every 10 steps: step 20 is of 10 steps, not of 23 or of none."""
    told, progress = {}, Works()
    monitor = started(progress, told)

    def take(steps):
        for step in steps:
            progress.step()
            counts = {"lm": torch.tensor(6.0)}
            monitor.on_before_update(SimpleNamespace(tokens=16, step=step, count=counts.get))
            if step % 10 == 0:
                monitor.on_step(SimpleNamespace(**{**REPORT, "step": step}))
                found.append({name: float(told[name]) for name in names})

    names = ("time/forward_backward", "time/data", "speed/effective_tokens_per_second")
    found = []
    take(range(1, 24))
    monitor.on_rollback(RollbackReport(23, 23, 10, (0, 1), 1, "a spike"))
    take(range(11, 31))
    expected = dict(zip(names, (2.0, 1.0, 2.0), strict=True))
    assert found == [pytest.approx(expected)] * 4
