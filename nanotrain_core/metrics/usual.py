"""The usual value of a metric in this run, for rules relative to it. Torch-free."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median

from nanotrain_core.metrics.declared import Rule

#: Number of last values whose median is the usual value.
USUAL = 100
#: Minimum number of values for a usual value.
USUAL_KNOWN = 30


class Usual:
    """The last finite values of one metric.

    >>> usual = Usual([1.0, 3.0, 2.0] * 10)
    >>> usual.before(9.0), Usual().before(9.0)
    (2.0, None)
    """

    def __init__(self, values: Iterable[float] = ()) -> None:
        self.values = deque(values, maxlen=USUAL)

    def before(self, value: float) -> float | None:
        """Return the median of the values before ``value``, None if too few; record ``value`` if finite."""
        usual = median(self.values) if len(self.values) >= USUAL_KNOWN else None
        if math.isfinite(value):
            self.values.append(value)
        return usual


def is_relative(rule: Rule | None) -> bool:
    """Return whether a rule is relative to the usual value."""
    return rule is not None and not (rule.warn_times is None and rule.bad_times is None)
