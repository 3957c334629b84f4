"""Fewer points of a long curve that look the same: nothing that stands out is lost."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanotrain_report.families import Line, Steps, Values

#: Points that a curve may have: more than a screen has columns.
MOST_POINTS = 1000
#: Cells that a heat map may have.
MOST_CELLS = 24_000
MOST_COLUMNS = 240


def narrow(values: Values) -> NDArray[np.floating[Any]]:
    """Return values as float32, half the bytes in a page, unless one of them is too large for that."""
    finite = values[np.isfinite(values)]
    fits = not len(finite) or np.abs(finite).max() < np.finfo(np.float32).max
    return values.astype(np.float32) if fits else values.astype(np.float64)


def thin(steps: Steps, values: Values, most: int = MOST_POINTS) -> tuple[Steps, Values]:
    """Return at most ``most`` of the points [n]: every kept one is real, at its own step.

    The curve is cut into stretches of equally many points. Of each, the first and the last, the smallest
    and the largest, and the first that is not finite stay: minima, maxima and NaN survive at any length.

    Source: U. Jugel et al., "M4: A Visualization-Oriented Time Series Data Aggregation", VLDB 2014.
    """
    if len(steps) <= most:
        return steps, values
    kept: set[int] = set()
    edges = np.linspace(0, len(steps), max(1, most // 5) + 1).astype(int)
    for first, end in pairwise(edges.tolist()):
        part = values[first:end]
        finite = np.isfinite(part)
        kept |= {first, end - 1}
        if finite.any():
            kept.add(first + int(np.argmin(np.where(finite, part, np.inf))))
            kept.add(first + int(np.argmax(np.where(finite, part, -np.inf))))
        if not finite.all():
            kept.add(first + int(np.argmin(finite)))
    index = np.array(sorted(kept))
    return steps[index], values[index]


def smooth(values: Values, window: int) -> Values:
    """Return the median over ``window`` points around each.

    It lags behind nothing, as a trailing mean does, and does not swell around a spike. At both ends, and
    around what is not finite, it is of the points that there are.
    """
    reach = min(window // 2, (len(values) - 1) // 2)
    finite = np.where(np.isfinite(values), values, np.nan)
    if reach < 1 or not np.isfinite(finite).any():
        return finite
    out = np.empty_like(finite)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a stretch without a number is NaN
        views = np.lib.stride_tricks.sliding_window_view(finite, 2 * reach + 1)
        out[reach : len(values) - reach] = np.nanmedian(views, axis=1)
        for near in range(reach):  # as many on both sides: else the ends would lean inwards
            out[near] = np.nanmedian(finite[: 2 * near + 1])
            out[-1 - near] = np.nanmedian(finite[len(values) - 2 * near - 1 :])
    return _mean(out, reach // 2)  # takes the corners off a median's steps


def _mean(values: Values, reach: int) -> Values:
    """Return the mean of each value with as many on either side, ``reach`` where there are."""
    known = np.isfinite(values)
    total = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    count = np.concatenate([[0], np.cumsum(known)])
    places = np.arange(len(values))
    reaches = np.minimum(reach, np.minimum(places, places[::-1]))
    first, end = places - reaches, places + reaches + 1
    counted = count[end] - count[first]
    return np.where(known, (total[end] - total[first]) / np.maximum(counted, 1), np.nan)


def grid(lines: Sequence[Line], *, lowest: bool = False) -> tuple[Values, Steps]:
    """Return a matrix [line, column] of curves, and the columns' edges in steps [columns + 1].

    A cell has the largest value of its steps (``lowest``: the smallest), NaN where there is none.
    """
    steps = np.unique(np.concatenate([line.steps for line in lines]))
    columns = max(1, min(MOST_COLUMNS, len(steps), MOST_CELLS // max(1, len(lines))))
    bounds = np.linspace(0, len(steps), columns + 1).astype(int)
    starts = steps[bounds[:-1]]
    gap = int(np.median(np.diff(steps))) if len(steps) > 1 else 1
    cells = np.full((len(lines), columns), np.nan)
    for row, line in enumerate(lines):
        finite = np.isfinite(line.values)
        places = np.searchsorted(starts, line.steps[finite], side="right") - 1
        worst = np.fmin if lowest else np.fmax
        worst.at(cells[row], places, line.values[finite])
    return cells, np.append(starts, steps[-1] + gap)
