"""How a loss moved from its first to its newest value, as far as one can tell it from noise."""

from __future__ import annotations

import math

import attrs
import numpy as np

from nanotrain_report.families import Steps, Values

#: First values whose median is what a loss began at: few, as it falls fastest then.
BEGINNING = 5
#: Standard errors beyond which a loss has fallen or risen since its beginning, or is above its best.
CLEAR = 3.0
#: Those beyond which it fell in the last fifth.
FALLS = 2.0
#: Fraction of the total decrease that must be in the last fifth: otherwise the loss has levelled off.
STILL_FALLS = 0.005
#: Fraction of the total decrease by which a loss that has got worse is above its best. Where noise hides a
#: change as large as that in the last fifth, none can be told.
WORSE = 0.1
#: Fraction of a loss: where noise hides a fall as large as that, it is too early for a judgment.
HIDDEN = 0.05
#: Fraction of a loss below which a difference is none.
SAME = 0.001
#: Standard error of the median of normally distributed values, over that of their mean.
OF_MEDIAN = math.sqrt(math.pi / 2)


@attrs.define(frozen=True)
class Trend:
    """The course of a loss."""

    first: float
    """Median of the first values."""
    now: float
    """Median of the last twentieth."""
    best: float
    """The smallest value of a loss without noise, or else the smallest median of a fifth."""
    best_step: int
    change: float
    """Median of the fifth before the last minus that of the last: above 0 if it fell."""
    fell: bool
    """Whether the newest values are clearly below the first ones."""
    rose: bool
    """Whether they are clearly above them, however many of either are compared."""
    worse: bool
    """Whether they are clearly above the best."""
    early: bool
    """Whether noise hides a fall since the beginning of :data:`HIDDEN` of the loss."""
    falls: bool
    """Whether it clearly fell in the last fifth."""
    blurred: bool
    """Whether noise hides a change in the last fifth of a tenth of the whole one."""


def trend_of(steps: Steps, values: Values, *, noisy: bool) -> Trend:
    """Return the trend of two or more finite values [n] at ascending steps [n].

    Args:
        noisy: whether each value is of another batch, and not all of the same text.
    """
    count = len(values)
    twentieth, fifth = max(1, count // 20), max(1, count // 5)
    sigma = noise(values) if noisy else 0.0

    def error(one: int, other: int) -> float:
        """Return the standard error of the difference between medians of so many values."""
        return OF_MEDIAN * sigma * math.sqrt(1 / one + 1 / other)

    beginning = min(BEGINNING, twentieth)
    first, now = float(np.median(values[:beginning])), float(np.median(values[-twentieth:]))
    same = SAME * abs(first)
    # Few values tell a fall of the first steps, and many a slow one.
    rises = [
        (now - first, max(same, CLEAR * error(beginning, twentieth))),
        (
            float(np.median(values[-fifth:]) - np.median(values[:fifth])),
            max(same, CLEAR * error(fifth, fifth)),
        ),
    ]
    fell = any(rise < -clear for rise, clear in rises)
    parts = np.array_split(np.arange(count), min(count, 5) if noisy else count)
    best_part = min(parts, key=lambda part: float(np.median(values[part])))
    best = float(np.median(values[best_part]))
    above = max(WORSE * (first - best), same, CLEAR * error(twentieth, len(best_part)))
    change = float(np.median(values[-2 * fifth : -fifth]) - np.median(values[-fifth:]))
    return Trend(
        first=first,
        now=now,
        best=best,
        best_step=int(steps[best_part[values[best_part].argmin()]]),
        change=change,
        fell=fell,
        rose=not fell and any(rise > clear for rise, clear in rises),
        worse=now - best > above,
        early=CLEAR * error(fifth, fifth) > HIDDEN * abs(first),
        falls=change > max(STILL_FALLS * (first - now), FALLS * error(fifth, fifth)),
        blurred=FALLS * error(fifth, fifth) > WORSE * (first - now),
    )


def noise(values: Values) -> float:
    """Return the standard deviation of values around their course, 0 for fewer than three.

    It is estimated from second differences, in which a straight course cancels, by their median magnitude,
    which spikes hardly change: 1.48 times that of normally distributed numbers is their standard deviation.
    """
    bends = np.abs(np.diff(values, 2))
    return 1.4826 * float(np.median(bends)) / math.sqrt(6) if len(bends) else 0.0
