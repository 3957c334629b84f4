"""The baseline of a metric in this run, for rules relative to it. Torch-free."""

from __future__ import annotations

from statistics import median

import attrs

from nanotrain_core.metrics.declared import Rule

#: Maximum number of values that are kept, whose median is the baseline.
MOST_VALUES = 100
#: Minimum number of good values for a baseline: the first ones, while training begins, are not typical.
BASELINE_COUNT = 60


@attrs.define
class Baseline:
    """The median of all values of one metric so far that its rule calls good.

    Values that are not good do not count: a problem that lasts does not become the baseline. The others all
    count, not only the last ones: a value that doubles again and again is seen, however slowly it does.

    >>> rule, baseline = Rule(warn_times=2), Baseline()
    >>> [baseline.update(value, rule) for value in [1.0] * 60 + [9.0] * 200][-1], Baseline().update(9.0, rule)
    (1.0, None)
    """

    values: list[float] = attrs.field(factory=list)
    """The values that are kept: evenly spread over all good ones so far."""
    count: int = 0
    """Number of good values so far."""
    every: int = 1
    """Every how many good values one is kept: 1 keeps all."""

    def update(self, value: float, rule: Rule) -> float | None:
        """Return the median of the values before ``value``, None if too few; record ``value`` if good."""
        baseline = median(self.values) if self.count >= BASELINE_COUNT else None
        if rule.judge(value, baseline) == "good":
            if self.count % self.every == 0:
                self.values.append(value)
            self.count += 1
            if len(self.values) > MOST_VALUES:
                self.values, self.every = self.values[::2], 2 * self.every
        return baseline


def is_relative(rule: Rule | None) -> bool:
    """Return whether a rule is relative to the baseline."""
    return rule is not None and not (rule.warn_times is None and rule.bad_times is None)
