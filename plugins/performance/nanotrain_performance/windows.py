"""Robust numbers of the last steps. Torch-free."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that a ``share`` of ``values`` does not exceed, between two by linear interpolation.

    >>> percentile([4.0, 1.0, 2.0, 3.0], 0.5)
    2.5
    """
    return in_order(sorted(values), share)


def in_order(ascending: Sequence[float], share: float) -> float:
    """Return :func:`percentile` of values that ascend."""
    place = share * (len(ascending) - 1)
    below = int(place)
    above = min(below + 1, len(ascending) - 1)
    return ascending[below] + (place - below) * (ascending[above] - ascending[below])


class Growth:
    """By how much a number grows a step, and 0 until that can be told.

    It is the lesser of two slopes. One is the median of the differences between steps that are :attr:`LAG`
    apart: one jump, as a save or a first evaluation brings, is in ``LAG`` of them, fewer than half. The other
    is from the first ``LAG`` values to the last, of those the highest and of these the lowest left out: what
    comes and goes, as what the garbage collector finds, has none.
    """

    #: First values, while caches fill.
    SKIPPED = 4
    #: Values that are looked at.
    WINDOW = 14
    LAG = 4

    def __init__(self) -> None:
        self._seen = 0
        self._values: deque[float] = deque(maxlen=self.WINDOW)

    def add(self, value: float) -> None:
        """Take the number after one more step."""
        self._seen += 1
        if self._seen > self.SKIPPED:
            self._values.append(value)

    @property
    def per_step(self) -> float:
        """Return the growth."""
        values = [*self._values]
        if len(values) < self.WINDOW:
            return 0.0
        pairs = zip(values, values[self.LAG :], strict=False)
        usual = percentile([(after - before) / self.LAG for before, after in pairs], 0.5)
        low, high = sorted(values[: self.LAG])[-2], sorted(values[-self.LAG :])[1]
        return max(0.0, min(usual, (high - low) / (self.WINDOW - self.LAG - 1)))
