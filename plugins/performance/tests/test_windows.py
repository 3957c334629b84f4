"""Percentiles, and growth that is told from jumps."""

import random
import statistics

import pytest
from nanotrain_performance.windows import Growth, percentile


@pytest.mark.parametrize("count", [2, 5, 100])
def test_percentiles_are_those_of_the_inclusive_definition(count):
    values = [random.Random(count + n).random() for n in range(count)]
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    assert percentile(values, 0.5) == pytest.approx(statistics.median(values))
    assert percentile(values, 0.95) == pytest.approx(cuts[18])
    assert percentile([3.0], 0.95) == 3.0


def largest(values):
    growth, most = Growth(), 0.0
    for value in values:
        growth.add(value)
        most = max(most, growth.per_step)
    return most


def steps(count, at):
    return [at(n) for n in range(count)]


@pytest.mark.parametrize(
    "values",
    [
        steps(60, lambda n: 400.0),
        steps(60, lambda n: 400.0 - 300 * 0.3**n),  # caches that fill
        steps(60, lambda n: 400.0 + 200 * (n > 20)),  # the first evaluation
        steps(60, lambda n: 400.0 + 100 * (n > 20) + 90 * (n > 30)),
        steps(60, lambda n: 400.0 + 500 * (n % 10 == 0)),  # a save's copies
        steps(60, lambda n: 400.0 + 30 * ((n * 7919) % 5)),
        steps(60, lambda n: 400.0 + 5 * (n % 10)),  # garbage that is collected now and then
    ],
    ids=["steady", "warm-up", "jump", "jumps", "peaks", "noise", "garbage"],
)
def test_a_healthy_run_does_not_grow(values):
    assert largest(values) < 1.0


@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.parametrize("onset", [0, 30])
def test_growth_is_known_within_twenty_steps(every, onset):
    """2 MiB a step, in bursts, from one step on."""
    values = steps(onset + 20, lambda n: 400.0 + 2.0 * every * (max(0, n - onset) // every))
    assert 1.0 < largest(values) < 2.7
    assert largest([value + 100 * (n > onset + 9) for n, value in enumerate(values)]) > 1.0  # and a jump
