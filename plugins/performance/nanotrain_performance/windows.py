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
    """The growth of a number per step; 0 until :attr:`WINDOW` values are known.

    It is the lesser of two slopes. One is the median slope between values that are :attr:`LAG` steps apart: a
    single jump, such as at a save or a first evaluation, affects ``LAG`` of these pairs, fewer than half. The
    other goes from the second-highest of the first ``LAG`` values to the second-lowest of the last ``LAG``:
    memory that comes and goes, such as what the garbage collector frees, has no such slope.
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
        low, high = sorted(values[: self.LAG])[-2], sorted(values[-self.LAG :])[1]
        if high <= low:  # as in most steps
            return 0.0
        pairs = zip(values, values[self.LAG :], strict=False)
        usual = percentile([(after - before) / self.LAG for before, after in pairs], 0.5)
        return max(0.0, min(usual, (high - low) / (self.WINDOW - self.LAG - 1)))
