"""How far runs are from others of the same seeds, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, stdev

import attrs

from nanotrain_core.contracts import EvaluationReport, Monitor

#: 97.5% quantiles of Student's t for 1, 2, ... degrees of freedom. The last, for more, is up to 14% too wide.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


class LastLoss(Monitor):
    """Keeps the loss of the last evaluation."""

    loss = math.nan
    tokens = 0

    def on_evaluation(self, report: EvaluationReport) -> None:
        """Keep it."""
        self.loss, self.tokens = report.loss, report.tokens


@attrs.define(frozen=True)
class Gap:
    """The difference of each seed, which are independent of one another."""

    each: tuple[float, ...]

    @classmethod
    def between(cls, losses: Sequence[float], base: Sequence[float]) -> Gap:
        """Return losses less those of the same seeds, in nats."""
        return cls(tuple(a - b for a, b in zip(losses, base, strict=True)))

    @classmethod
    def relative(cls, losses: Sequence[float], base: Sequence[float]) -> Gap:
        """Return how much larger losses are than those of the same seeds: 0.01 is 1%."""
        return cls(tuple(a / b - 1 for a, b in zip(losses, base, strict=True)))

    @property
    def mean(self) -> float:
        return mean(self.each)

    @property
    def error(self) -> float:
        """Of the mean: its standard error, NaN of one seed."""
        return stdev(self.each) / math.sqrt(len(self.each)) if len(self.each) > 1 else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Where the mean of endless seeds is with 95% confidence, if seeds are normally distributed."""
        around = STUDENT[min(len(self.each) - 1, len(STUDENT)) - 1] * self.error
        return self.mean - around, self.mean + around

    def seeds_for(self, half_width: float) -> int:
        """Return how many seeds, spread as these, would make a 95% interval that narrow."""
        return math.ceil((1.96 * stdev(self.each) / half_width) ** 2)


def unpaired(losses: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """Return the difference of two means, and its 95% interval, of runs whose seeds have nothing in common.

    Source: Welch, Biometrika 34 (1947), with degrees of freedom rounded down.

    Args:
        losses: of two runs or more.
        others: likewise.
    """
    own, theirs = (stdev(each) ** 2 / len(each) for each in (losses, others))
    difference, error = mean(losses) - mean(others), math.sqrt(own + theirs)
    if not error:
        return difference, difference, difference
    degrees = error**4 / (own**2 / (len(losses) - 1) + theirs**2 / (len(others) - 1))
    around = STUDENT[min(max(1, math.floor(degrees)), len(STUDENT)) - 1] * error
    return difference, difference - around, difference + around
