"""Failures and checkpoints of a long run: goodput, and the best interval between checkpoints. Torch-free.

Failures come by themselves, exponentially distributed. After one the run restarts and computes again what was
done since the last checkpoint; failures happen also during checkpoints and restarts.

Sources: Young, "A First Order Approximation to the Optimum Checkpoint Interval", CACM 17(9), 1974; Daly, "A
Higher Order Estimate of the Optimum Checkpoint Interval for Restart Dumps", FGCS 22, 2006.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import ceil, exp, expm1, sqrt

import attrs

#: Failures to expect in the time that a restart, or the work between two checkpoints, may take.
MOST_FAILURES = 5


@attrs.define(frozen=True, kw_only=True)
class Failures:
    """What a run loses time with, in seconds."""

    mean: float
    """Between failures of the whole run."""
    checkpoint: float
    """In which training waits for a checkpoint."""
    restart: float
    """From a failure until training goes on from the last checkpoint."""


def young(failures: Failures) -> float:
    """Return the interval of work between checkpoints, of first order: sqrt(2 C M).

    >>> young(Failures(mean=5000.0, checkpoint=25.0, restart=0.0))
    500.0
    """
    return sqrt(2 * failures.checkpoint * failures.mean)


def daly(failures: Failures) -> float:
    """Return Daly's interval of higher order; of checkpoints that take long, the mean between failures."""
    c, m = failures.checkpoint, failures.mean
    if c >= 2 * m:
        return m
    ratio = c / (2 * m)
    return sqrt(2 * c * m) * (1 + sqrt(ratio) / 3 + ratio / 9) - c


def expected_time(work: float, interval: float, failures: Failures) -> float:
    """Return the expected seconds of ``work`` seconds of training.

    Daly's complete model: M e^(R/M) (e^((tau + C)/M) - 1) for each interval tau.
    """
    m = failures.mean
    return m * exp(failures.restart / m) * expm1((interval + failures.checkpoint) / m) * work / interval


def goodput(interval: float, failures: Failures) -> float:
    """Return the expected share of time that goes into work that counts."""
    return interval / expected_time(interval, interval, failures)


def simulate_run(work: float, interval: float, failures: Failures, seed: int) -> float:
    """Return the seconds that one run takes, with failures drawn from ``seed``."""
    draw = random.Random(seed)
    count = max(1, ceil(work / interval - 1e-9))
    last = work - interval * (count - 1) + failures.checkpoint  # a checkpoint ends the run, too
    needed, time, done, left = interval + failures.checkpoint, 0.0, 0, draw.expovariate(1 / failures.mean)
    while done < count:
        whole = min(int(left / needed), count - 1 - done)  # that no failure interrupts
        time, left, done = time + whole * needed, left - whole * needed, done + whole
        own = last if done == count - 1 else needed
        if left >= own:
            time, left, done = time + own, left - own, done + 1
            continue
        time += left
        left = draw.expovariate(1 / failures.mean)
        while left < failures.restart:  # another one while it starts again
            time += left
            left = draw.expovariate(1 / failures.mean)
        time, left = time + failures.restart, left - failures.restart
    return time


@attrs.define(frozen=True, kw_only=True)
class Goodput:
    """Of one interval between checkpoints."""

    interval: float
    expected: float
    """By Daly's model."""
    simulated: float
    """The mean of the simulated runs."""


def simulated_goodput(interval: float, failures: Failures, *, runs: int, seed: int) -> float:
    """Return work over time of runs that are long enough for dozens of failures each."""
    work = max(40 * failures.mean, 40 * interval)
    times = [simulate_run(work, interval, failures, seed + number) for number in range(runs)]
    return work * runs / sum(times)


def best_interval(failures: Failures, *, runs: int, seed: int) -> Goodput:
    """Return the interval with the highest simulated goodput, of a grid around Daly's, by the same draws."""
    center = max(daly(failures), 1e-3)
    found = [of_interval(center * 2 ** (step / 4), failures, runs=runs, seed=seed) for step in range(-8, 9)]
    return max(found, key=lambda each: (each.simulated, -each.interval))


def of_interval(interval: float, failures: Failures, *, runs: int, seed: int) -> Goodput:
    """Return the goodput of an interval, by the model and simulated."""
    simulated = simulated_goodput(interval, failures, runs=runs, seed=seed)
    return Goodput(interval=interval, expected=goodput(interval, failures), simulated=simulated)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that so many of all are not above.

    >>> percentile([3.0, 1.0, 2.0, 4.0], 0.5)
    2.0
    """
    ordered = sorted(values)
    position = min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))
    return ordered[position]
