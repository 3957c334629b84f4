"""Slow ranks and failures, against closed forms."""

import json
from math import exp

import pytest
import torch
from nanotrain_plan.goodput import (
    Failures,
    best_interval,
    daly,
    expected_time,
    goodput,
    simulate_run,
    simulated_goodput,
    young,
)
from nanotrain_plan.many import Stragglers, makespans, step_times
from nanotrain_plan.simulation import read_times

from nanotrain_core.api import Action, Durations, NanotrainError, simulate

FAILURES = Failures(mean=10_000.0, checkpoint=100.0, restart=300.0)


def test_simulated_runs_take_the_expected_time():
    """Daly's complete model is exact for exponential failures: 400 runs are within 4 standard errors."""
    work, interval, n = 100_000.0, 2000.0, 400
    times = torch.tensor([simulate_run(work, interval, FAILURES, seed) for seed in range(n)])
    expected = expected_time(work, interval, FAILURES)
    assert abs(times.mean() - expected) < 4 * times.std() / n**0.5
    assert expected == pytest.approx(50 * 10_000 * exp(0.03) * (exp(0.21) - 1))


def test_without_failures_only_checkpoints_cost():
    rare = Failures(mean=1e12, checkpoint=100.0, restart=300.0)
    assert simulate_run(10_000.0, 1000.0, rare, 0) == pytest.approx(10_000 + 10 * 100)
    assert goodput(1000.0, rare) == pytest.approx(1000 / 1100)


def test_daly_s_interval_is_the_best_of_the_model_and_near_that_of_the_simulation():
    best = daly(FAILURES)
    assert best == pytest.approx(young(FAILURES), rel=0.1)
    model = [goodput(best * factor, FAILURES) for factor in (0.8, 1.0, 1.25)]
    assert model[1] == max(model)
    found = best_interval(FAILURES, runs=10, seed=1)
    assert found == best_interval(FAILURES, runs=10, seed=1)  # seeded
    assert goodput(found.interval, FAILURES) > model[1] - 0.01
    assert simulated_goodput(best, FAILURES, runs=10, seed=1) <= found.simulated


def one_stage(ranks, share, waiting=1):
    return step_times(
        [[Action("F", 0, 0), Action("B", 0, 0)]],
        Durations(forward=1.0, backward=1.0, weight=1.0),
        0.0,
        pipelines=ranks // waiting,
        waiting=waiting,
        stragglers=Stragglers(share=share, factor=2.0),
        steps=4000,
        seed=3,
    )


@pytest.mark.parametrize("waiting", [1, 4])
def test_the_slowest_of_n_ranks_decides(waiting):
    """A step is slow unless all n ranks are fast: with probability 1 - (1 - share)^n."""
    found = one_stage(16, 0.02, waiting)
    slow = 1 - 0.98**16
    deviation = (slow * (1 - slow) / 4000) ** 0.5
    assert abs(found.mean - 3.0 * (1 + slow)) < 4 * 3.0 * deviation
    assert (found.ideal, found.p50, found.p99) == (3.0, 3.0, 6.0)


def test_many_runs_of_a_schedule_at_once_are_those_of_the_simulator():
    """A slow rank is a stage whose actions all take longer, which the simulator can be told."""
    pp, m = 3, 5
    lists = [[Action(kind, rank, n) for kind in "FB" for n in range(m)] for rank in range(pp)]
    base = Durations(forward=1.0, backward=1.5, weight=0.5, p2p=0.25)
    factors = torch.tensor([[1.0, 1.0, 1.0], [1.0, 3.0, 1.0], [2.0, 1.0, 1.5]], dtype=torch.float64)
    for found, each in zip(makespans(lists, base, factors), factors.tolist(), strict=True):
        times = Durations(
            forward=each, backward=[1.5 * f for f in each], weight=[0.5 * f for f in each], p2p=0.25
        )
        assert float(found) == pytest.approx(simulate(lists, times).makespan)


def test_measured_times_are_read_and_wrong_ones_told(tmp_path):
    path = tmp_path / "times.json"
    path.write_text(json.dumps({"forward": [1, 2], "backward": 3, "after": 0.5}))
    times, after = read_times(path, 2)
    assert (times.forward, times.backward, times.weight, after) == ((1.0, 2.0), (3.0, 3.0), (0.0, 0.0), 0.5)
    for table, told in (
        ({"forward": [1], "backward": 1}, r"forward: expected a number of seconds, or 2, one for each stage"),
        ({"forward": 1}, r"backward: expected .* got nothing"),
        ({"forward": 1, "backward": 1, "p2p": "x"}, r"p2p: expected a number of seconds, got 'x'"),
        ({"forwards": 1}, r"forwards: no such key .did you mean .forward.*; keys: forward, backward"),
        ([], r"expected an object such as"),
    ):
        path.write_text(json.dumps(table))
        with pytest.raises(NanotrainError, match=told):
            read_times(path, 2)
