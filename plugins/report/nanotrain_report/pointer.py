"""Tooltips of a chart: all its values at the step under the pointer, in one box."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import attrs
import numpy as np
from bokeh.models import ColumnDataSource, HoverTool
from bokeh.plotting import figure

from nanotrain_report.families import Steps, Values
from nanotrain_report.sampling import narrow, thin

#: Steps at which the pointer finds values: a screen's worth.
MOST_HOVERED = 400


@attrs.define(frozen=True, eq=False)
class Series:
    """A curve as it is drawn."""

    label: str
    steps: Steps
    values: Values
    color: str
    width: float = 1.6
    alpha: float = 1.0
    dots: bool = False
    hover: bool = True


def tell_values(chart: figure, series: Sequence[Series], *, log: bool) -> None:
    """Tell the values of all curves at the step under the pointer, in one box."""
    if not series:
        return
    longest = max(series, key=lambda each: len(each.steps))
    steps, _ = thin(longest.steps, longest.values, MOST_HOVERED)
    data: dict[str, Any] = {"x": steps}
    rows = ""
    for number, each in enumerate(series):
        at = np.clip(np.searchsorted(each.steps, steps, side="right") - 1, 0, None)
        values = np.where((steps >= each.steps[0]) & (steps <= each.steps[-1]), each.values[at], np.nan)
        data[f"y{number}"] = narrow(values)
        rows += tip_row(each.label, f"@y{number}{{0.[00000]}}", each.color)
    finite = data["y0"][np.isfinite(data["y0"]) & ((data["y0"] > 0) | (not log))]
    usual = float(np.median(finite)) if len(finite) else 1.0
    data["y"] = np.where(np.isfinite(data["y0"]) & ((data["y0"] > 0) | (not log)), data["y0"], usual)
    line = chart.line("x", "y", source=ColumnDataSource(data), line_alpha=0)
    chart.add_tools(HoverTool(renderers=[line], mode="vline", tooltips=tip_box(rows), line_policy="nearest"))


def tip_row(label: str, value: str, color: str) -> str:
    """Return a line of a box: a color, its name, its value."""
    chip = f'<i style="display:inline-block;width:9px;height:9px;border-radius:2px;background:{color}"></i>'
    return f'<div style="white-space:nowrap">{chip} {escape(label)} <b>{value}</b></div>'


def tip_box(rows: str) -> str:
    """Return a box that says which step it tells of."""
    step = '<span style="opacity:.7">step @x{0,0}</span>'
    return f'<div style="font-size:12.5px;line-height:1.5">{step}{rows}</div>'
