"""How long steps took, by the dates of their rows: those jump if a clock is set, or a machine sleeps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nanotrain_report.folder import RunFolder

#: Steps whose median says how long the next ones take.
RECENT = 20
#: A step that by the dates took so many times as long as usual, and so many seconds, has been dated by a
#: clock that jumped: hang detection ends what takes longer, unless its default is changed.
FAR, LONGEST = 100.0, 1200.0
#: Curves with the seconds of what lies between two steps, by the monotonic clock of the run.
BETWEEN = ("validation/seconds", "checkpoint/blocked")


def pace(run: RunFolder) -> float | None:
    """Return the seconds of a step, the median of the last ones. No date is in it."""
    seconds = run.line("seconds")
    return float(np.nanmedian(seconds.values[-RECENT:])) if seconds is not None else None


def gaps(run: RunFolder) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Return the seconds between logged steps, with everything between them, and in which the run was begun
    again: there a pause may have any length."""
    times, usual, curves = run.history.times, pace(run), run.history.curves
    seconds: npt.NDArray[Any] = np.diff(np.asarray(times.values, np.float64))
    measured = np.zeros_like(seconds)
    for curve in filter(None, map(curves.get, BETWEEN)):
        gap, inside = _gaps_with(times.steps, curve.steps)
        np.add.at(measured, gap, np.asarray(curve.values, np.float64)[inside])
    expected = np.diff(np.asarray(times.steps, np.int64)) * (usual or 0.0)
    resumed = _any(times.steps, [continuation.step for continuation in run.history.continuations])
    # What nobody measured may have taken any time.
    failed = [row["step"] for row in run.history.events if row["event"] == "save_failed"]
    # A checkpoint component may leave `blocked` out, which is then 0.
    saved = [row["step"] for row in run.history.events if row["event"] == "checkpoint" and not row["blocked"]]
    of_any_length = resumed | _any(times.steps, [*failed, *saved])
    far = np.maximum(FAR * expected, LONGEST) + measured if usual is not None else np.inf
    jumped = (seconds < 0) | ~of_any_length & (seconds > far)
    return np.where(jumped, expected + measured, seconds), resumed


def _any(logged: Sequence[int], steps: Sequence[int]) -> npt.NDArray[np.bool_]:
    """Return for each gap between two logged steps whether one of ``steps`` is its first or lies in it."""
    found = np.zeros(max(0, len(logged) - 1), np.bool_)
    found[_gaps_with(logged, steps)[0]] = True
    return found


def _gaps_with(
    logged: Sequence[int], steps: Sequence[int]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return the gaps between logged steps that ``steps`` begin or lie in, and which of these are in any."""
    after = np.searchsorted(logged, np.asarray(steps, np.int64), side="right") - 1
    inside = (after >= 0) & (after < len(logged) - 1)
    return after[inside], inside


def took(run: RunFolder, first: int, last: int) -> float | None:
    """Return the seconds from one step to another, None if either was not logged."""
    steps = run.history.times.steps
    begin, end = np.searchsorted(steps, [first, last])
    if end >= len(steps) or (steps[begin], steps[end]) != (first, last):
        return None
    return float(gaps(run)[0][begin:end].sum())


def wall(run: RunFolder) -> float:
    """Return the seconds from the first row to the last, pauses included; NaN without rows."""
    rows, times = run.history.events, run.history.times
    dates = [float(row["time"]) for row in rows]
    if not len(times):
        return max(dates) - min(dates) if dates else float("nan")
    seconds = float(gaps(run)[0].sum())
    if rows:
        seconds += max(0.0, times.values[0] - dates[0])
        keys = ("restored", "first_step", "step")  # where the last event is: steps may have been logged since
        if next((rows[-1][key] for key in keys if key in rows[-1]), math.inf) >= times.steps[-1]:
            seconds += max(0.0, dates[-1] - times.values[-1])
    return seconds
