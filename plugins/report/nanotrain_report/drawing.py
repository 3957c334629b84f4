"""Families of curves as charts: few are lines, many are a heat map, and several runs lie over each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from bokeh.palettes import cividis

from nanotrain_report.blocks import Chart, Key
from nanotrain_report.charts import COLORS, MOST_LINES, SEAM, Mark, curves, heat
from nanotrain_report.families import Family, Line, as_arrays
from nanotrain_report.folder import Shown
from nanotrain_report.number_format import capital, plural, quantity
from nanotrain_report.pointer import Series
from nanotrain_report.sampling import smooth

#: From a ratio between largest and smallest value on, an axis is logarithmic.
LOG_FROM = 50.0
MAP = cividis(64)
#: Points from which a curve is also shown smoothed.
SMOOTHED_FROM = 60


def marks_of(each: Shown, *, alone: bool = True) -> list[Mark]:
    """Return a mark where each attempt but the first begins, in the run's color if there are several."""
    return [
        Mark(continuation.step, SEAM if alone else each.color)
        for continuation in each.run.history.continuations
    ]


def family_charts(shown: Sequence[Shown], name: str) -> list[Chart]:
    """Return the charts of the family that a declaration names, of all runs that have it."""
    owners = [(each, family) for each in shown for family in each.run.families if family.metric.name == name]
    if not owners:
        return []
    if all(len(family.lines) == 1 for _, family in owners):
        return [single(owners)]
    return [several(each, family, alone=len(shown) == 1) for each, family in owners]


def single(owners: Sequence[tuple[Shown, Family]]) -> Chart:
    """Return one chart with the curve of each run."""
    metric = owners[0][1].metric
    series: list[Series] = []
    alone = len(owners) == 1
    for each, family in owners:
        series += line_of(each, family.lines[0], alone=alone)
    lines = [family.lines[0] for _, family in owners]
    chart = curves(
        series,
        unit=metric.unit,
        log=metric.name != "lr" and wants_log(lines),  # its end at 0 would fill the chart
        rule=metric.rule,
        marks=[mark for each, _ in owners for mark in marks_of(each, alone=alone)],
    )
    return Chart(
        title=lines[0].name,
        figure=chart,
        note=_note(metric.summary, metric.unit),
        keys=[] if alone else [Key(each.label, each.color) for each, _ in owners],
        words="; ".join(in_words(line, metric.unit) for line in lines),
        names=[line.name for line in lines],
    )


def line_of(each: Shown, line: Line, *, alone: bool) -> list[Series]:
    """Return a run's curve: smoothed over its raw values where there are many; given-up steps faint."""
    label = line.name if alone else each.label
    found = []
    for abandoned in each.run.history.abandoned.values():
        if line.name in abandoned:
            found.append(
                Series("given up", *as_arrays(abandoned[line.name]), each.color, 1.2, 0.35, hover=False)
            )
    many = len(line.steps) >= SMOOTHED_FROM and rough(line)
    raw = Series(label, line.steps, line.values, each.color, 1.0 if many else 1.7, 0.3 if many else 1.0)
    found.append(raw)
    if many:
        averaged = smooth(line.values, max(7, len(line.steps) // 40))
        found.append(Series(f"{label}, median around it", line.steps, averaged, each.color, 1.9))
    return found


def rough(line: Line) -> bool:
    """Return whether a curve goes up and down so often that an average helps the eye."""
    changes = np.diff(line.values[np.isfinite(line.values)])
    changes = changes[changes != 0]
    return len(changes) > SMOOTHED_FROM // 2 and bool(np.mean(changes[1:] * changes[:-1] < 0) > 0.25)


def several(each: Shown, family: Family, *, alone: bool) -> Chart:
    """Return a family of one run: curves if they are few, a heat map else."""
    metric, lines = family.metric, family.lines
    title = family.title if alone else f"{family.title} of {each.label}"
    if family.placeholders and family.placeholders != ("over",):
        title += f" by {' and '.join(family.placeholders)}"
    note = _note(metric.summary, metric.unit)
    ranks = [line for line in family.others if line.label == "rank"]
    if ranks:
        note += f" The largest, on rank {ranks[0].last:.0f} at the end, and the mean of ranks."
    words = f"{plural(len(lines), 'curve')}; " + "; ".join(in_words(line, metric.unit) for line in lines[:3])
    names = [line.name for line in lines]
    if len(lines) <= MOST_LINES:
        series = [
            Series(line.label, line.steps, line.values, COLORS[n % len(COLORS)])
            for n, line in enumerate(lines)
        ]
        keys = [Key(one.label, one.color) for one in series] if len(series) > 1 else []
        drawn = curves(series, unit=metric.unit, log=wants_log(lines), rule=metric.rule, marks=marks_of(each))
        return Chart(title, drawn, note, keys, words=words, names=names)
    log = wants_log(lines)
    rule = metric.rule
    lowest = rule is not None and rule.warn_above is None and rule.bad_above is None
    drawn, (low, high) = heat(lines, unit=metric.unit, palette=MAP, log=log, lowest=lowest)
    ramp = (quantity(low, metric.unit), gradient(MAP), quantity(high, metric.unit))
    scale = "Colors follow the logarithm; " if log else ""
    cell = "a cell" if log else "A cell"
    which = "smallest" if lowest else "largest"
    note = f"{note} {scale}{cell} has the {which} value of its steps.".replace("  ", " ")
    return Chart(title, drawn, note, ramp=ramp, words=words, wide=len(lines) > 24, names=names)


def gradient(palette: Sequence[str]) -> str:
    """Return a palette as a CSS gradient."""
    return f"linear-gradient(to right,{','.join(palette[:: max(1, len(palette) // 12)])},{palette[-1]})"


def wants_log(lines: Iterable[Line]) -> bool:
    """Return whether values are all positive and far apart."""
    values = np.concatenate([line.values[np.isfinite(line.values)] for line in lines] or [np.array([])])
    return bool(len(values) and values.min() > 0 and values.max() / values.min() > LOG_FROM)


def in_words(line: Line, unit: str) -> str:
    """Return a curve as a sentence."""
    finite = np.isfinite(line.values)
    if not finite.any():
        return f"{line.name}: {plural(len(line.values), 'value')}, none of them a number"
    values, steps = line.values[finite], line.steps[finite]
    low, high = int(values.argmin()), int(values.argmax())
    text = (
        f"{line.name}: {plural(len(values), 'value')} from {quantity(float(values[0]), unit)} to "
        f"{quantity(float(values[-1]), unit)}, "
        f"lowest {quantity(float(values[low]), unit)} at step {steps[low]:,}, "
        f"highest {quantity(float(values[high]), unit)} at step {steps[high]:,}"
    )
    broken = int((~finite).sum())
    return text + (f", {broken} not finite" if broken else "")


def _note(summary: str, unit: str) -> str:
    return capital(summary) + ("." if summary else "")
