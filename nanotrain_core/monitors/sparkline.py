"""A curve as one line of text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-=+*#@"
#: Number of values that a history keeps: beyond it, neighbors are merged.
MOST = 512


class Points:
    """The values of a run so far, in bounded memory: old and new values are merged alike."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self._each, self._waiting = 1, list[float]()
        """How many reports each value is the mean of, and the reports not yet merged."""

    def add(self, value: float) -> None:
        """Append a value."""
        self._waiting.append(value)
        if len(self._waiting) < self._each:
            return
        self.values.append(_mean(self._waiting))
        self._waiting = []
        if len(self.values) >= MOST:
            pairs = zip(self.values[::2], self.values[1::2], strict=False)
            self.values = [_mean(pair) for pair in pairs]
            self._each *= 2

    def recent(self) -> list[float]:
        """Return the newer half, which shows the current trend; if there are few values, all of them."""
        return self.values[min(len(self.values) // 2, max(0, len(self.values) - 8)) :]


def sparkline(values: Sequence[float], width: int, *, ascii_only: bool = False) -> str:
    """Return at most ``width`` characters, each the mean of its share of the values; ``!`` for NaN and
    infinity.

    >>> sparkline([3, 2, 1, float("nan")], 8)
    '█▅▁!'
    """
    width = min(width, len(values))
    if width <= 0:
        return ""
    ends = [round(n * len(values) / width) for n in range(width + 1)]
    shares = [_mean(values[first:last]) for first, last in pairwise(ends)]
    finite = [x for x in shares if math.isfinite(x)]
    bars = ASCII_BARS if ascii_only else BARS
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(bars[round((x - low) * scale)] if math.isfinite(x) else "!" for x in shares)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
