"""The usual value of a metric in this run, for rules relative to it. Torch-free."""

from __future__ import annotations

from statistics import median

import attrs

from nanotrain_core.metrics.declared import Rule

#: Maximum number of values that are kept, of which the usual one is the median.
USUAL = 100
#: Minimum number of values for a usual value: the first ones, while training begins, are not usual.
USUAL_KNOWN = 60


@attrs.define
class Usual:
    """The median of all values of one metric so far that its rule calls good.

    Values that are not good do not count: a problem that lasts does not become the usual. The others all
    count, not only the last ones: a value that doubles again and again is seen, however slowly it does.

    >>> rule, usual = Rule(warn_times=2), Usual()
    >>> [usual.before(value, rule) for value in [1.0] * 60 + [9.0] * 200][-1], Usual().before(9.0, rule)
    (1.0, None)
    """

    values: list[float] = attrs.field(factory=list)
    """The values that are kept: evenly spread over all good ones so far."""
    count: int = 0
    """Number of good values so far."""
    every: int = 1
    """Every how many good values one is kept: 1 keeps all."""

    def before(self, value: float, rule: Rule) -> float | None:
        """Return the median of the values before ``value``, None if too few; record ``value`` if good."""
        usual = median(self.values) if self.count >= USUAL_KNOWN else None
        if rule.judge(value, usual) == "good":
            if self.count % self.every == 0:
                self.values.append(value)
            self.count += 1
            if len(self.values) > USUAL:
                self.values, self.every = self.values[::2], 2 * self.every
        return usual


def is_relative(rule: Rule | None) -> bool:
    """Return whether a rule is relative to the usual value."""
    return rule is not None and not (rule.warn_times is None and rule.bad_times is None)
