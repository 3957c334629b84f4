"""Figures of bokeh: curves, stacks, heat maps and timelines, with colors that a style sheet sets.

Axes, grids and labels take their colors from CSS (``--bk-...``), so that one file serves a light and a dark
page. Glyphs cannot: their colors are chosen to be legible on both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import numpy as np
from bokeh.models import (
    BoxAnnotation,
    ColumnDataSource,
    CustomJSHover,
    CustomJSTickFormatter,
    HoverTool,
    NumeralTickFormatter,
    Range1d,
    Span,
    TickFormatter,
)
from bokeh.plotting import figure

from nanotrain_core.api import Rule
from nanotrain_report.families import Line, Steps, Values
from nanotrain_report.pointer import Series, tell_values, tip_box, tip_row
from nanotrain_report.sampling import grid, narrow, thin

#: Of curves: legible on white and on black, and told apart by people who do not see all colors.
COLORS = ("#3f83c9", "#d9822b", "#2f9e7d", "#c2548d", "#8a6fd1", "#a08a2c", "#3aa0b5", "#c25b4e")
WARN, BAD, SEAM = "#d9972b", "#d1495b", "#8a8f98"
#: Lines that keep a legend readable; more are a heat map.
MOST_LINES = 8
HEIGHT = 230


@attrs.define(frozen=True)
class Mark:
    """A step at which something happened: a dashed line through every curve."""

    step: int
    color: str = SEAM


def frame(
    *, height: int = HEIGHT, log: bool = False, unit: str = "", x_unit: str = "step", **options: Any
) -> figure:
    """Return an empty figure, as wide as its place, that zooms along x by dragging."""
    chart = figure(
        height=height,
        sizing_mode="stretch_width",
        y_axis_type="log" if log else "linear",
        tools="xbox_zoom,xpan,reset,save",
        active_drag="xbox_zoom",
        background_fill_alpha=0,
        border_fill_alpha=0,
        outline_line_alpha=0,
        min_border_left=62,
        min_border_right=12,
        lod_threshold=None,
        **options,
    )
    chart.toolbar.logo = None
    chart.toolbar.autohide = True
    for axis in (chart.xaxis, chart.yaxis):
        axis.axis_line_alpha = 0
        axis.major_tick_line_alpha = 0
        axis.minor_tick_line_alpha = 0
        axis.major_label_text_font_size = "12px"
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_font_size = "12px"
        axis.axis_label_standoff = 6
    chart.xaxis.axis_label = x_unit
    chart.yaxis.axis_label = None if unit in ("", "1") else unit
    if x_unit == "step":
        chart.xaxis.formatter = NumeralTickFormatter(format="0,0")
    if not log:
        chart.yaxis.formatter = ticks(unit)
    chart.xgrid.grid_line_alpha = 0
    return chart


def ticks(unit: str) -> TickFormatter:
    """Return how an axis writes its values: bytes in their units, everything else short."""
    if unit in ("bytes", "B"):
        units = "const units = ['B', 'kB', 'MB', 'GB', 'TB']; let n = 0, v = tick;"
        return CustomJSTickFormatter(
            code=units + "while (Math.abs(v) >= 1000 && n < 4) { v /= 1000; n += 1 }"
            "return `${+v.toPrecision(3)} ${units[n]}`"
        )
    return CustomJSTickFormatter(
        code="const a = Math.abs(tick);"
        "if (a >= 1e6) return `${+(tick / 1e6).toPrecision(4)}M`;"
        "if (a >= 1e4) return `${+(tick / 1e3).toPrecision(4)}k`;"
        "if (a > 0 && a < 1e-3) return (+tick.toPrecision(3)).toExponential();"
        "return `${+tick.toPrecision(6)}`"
    )


def curves(
    series: Sequence[Series],
    *,
    unit: str = "",
    log: bool = False,
    rule: Rule | None = None,
    marks: Iterable[Mark] = (),
    height: int = HEIGHT,
) -> figure:
    """Return curves over steps, with a band where the rule is not kept, and marks."""
    chart = frame(height=height, log=log, unit=unit)
    for each in series:
        steps, values = thin(each.steps, each.values)
        shown = np.where(np.isfinite(values) & ((values > 0) | (not log)), values, np.nan)
        source = ColumnDataSource({"x": steps, "y": narrow(shown)})
        if each.dots or len(steps) == 1:
            chart.scatter(
                "x", "y", source=source, size=6, color=each.color, alpha=each.alpha, name=each.label
            )
            if len(steps) > 1:
                chart.line("x", "y", source=source, color=each.color, line_width=1, alpha=0.5 * each.alpha)
        else:
            chart.line(
                "x",
                "y",
                source=source,
                color=each.color,
                line_width=each.width,
                alpha=each.alpha,
                name=each.label,
            )
        _broken(chart, each)
    _limits(chart, series, rule)
    _marks(chart, marks)
    tell_values(chart, [each for each in series if each.hover], log=log)
    return chart


def _broken(chart: figure, series: Series) -> None:
    """Mark the steps whose value is no number, of which nothing else would be seen."""
    for step in series.steps[~np.isfinite(series.values)][:50].tolist():
        chart.add_layout(
            Span(location=step, dimension="height", line_color=BAD, line_width=2, line_alpha=0.5)
        )


def _limits(chart: figure, series: Sequence[Series], rule: Rule | None) -> None:
    """Shade what a rule does not call good, without making room for limits that are far away."""
    seen = [each.values[np.isfinite(each.values)] for each in series]
    values = np.concatenate(seen) if seen else np.array([])
    if rule is None or not len(values):
        return
    low, high = float(values.min()), float(values.max())
    bands = [
        (rule.warn_above, rule.bad_above, WARN),
        (rule.bad_above, None, BAD),
        (rule.bad_below, rule.warn_below, WARN),
        (None, rule.bad_below, BAD),
    ]
    for bottom, top, color in bands:
        if bottom is None and top is None:
            continue
        if (bottom is not None and bottom > high) or (top is not None and top < low):
            continue
        if (top is rule.warn_below and rule.warn_below is None) or (
            bottom is rule.warn_above and rule.warn_above is None
        ):
            continue
        chart.add_layout(
            BoxAnnotation(bottom=bottom, top=top, fill_color=color, fill_alpha=0.1, line_alpha=0)
        )


def _marks(chart: figure, marks: Iterable[Mark]) -> None:
    for mark in marks:
        line = Span(
            location=mark.step + 0.5,
            dimension="height",
            line_color=mark.color,
            line_dash="dashed",
            line_width=1.2,
        )
        chart.add_layout(line)


def stack(parts: Sequence[Line], *, unit: str, marks: Iterable[Mark] = ()) -> figure:
    """Return parts of a whole, one above the other; the first is at the bottom."""
    steps = parts[0].steps
    for part in parts[1:]:
        steps = np.union1d(steps, part.steps)
    filled = [_filled(part, steps) for part in parts]
    kept, _ = thin(steps, np.sum(filled, axis=0))
    places = np.searchsorted(steps, kept)
    chart = frame(unit=unit)
    below = np.zeros(len(places))
    data: dict[str, Any] = {"x": kept}
    for number, row in enumerate(filled):
        data[f"from{number}"] = below.astype(np.float32)
        below = below + row[places]
        data[f"to{number}"] = below.astype(np.float32)
        data[f"own{number}"] = row[places].astype(np.float32)
    source = ColumnDataSource(data)
    drawn = []
    for number, part in enumerate(parts):
        color = COLORS[number % len(COLORS)]
        drawn.append(
            chart.varea(
                "x", f"from{number}", f"to{number}", source=source, color=color, alpha=0.75, name=part.label
            )
        )
    line = chart.line("x", f"to{len(parts) - 1}", source=source, line_alpha=0)
    told = reversed([*enumerate(parts)])  # as they lie
    rows = "".join(tip_row(p.label, f"@own{n}{{0.[0000]}}", COLORS[n % len(COLORS)]) for n, p in told)
    chart.add_tools(HoverTool(renderers=[line], mode="vline", tooltips=tip_box(rows)))
    chart.y_range.start = 0
    _marks(chart, marks)
    return chart


def _filled(line: Line, steps: Steps) -> Values:
    """Return a curve at all ``steps``: the value before where it has none."""
    at = np.clip(np.searchsorted(line.steps, steps, side="right") - 1, 0, None)
    return np.nan_to_num(line.values[at])


def heat(
    lines: Sequence[Line],
    *,
    unit: str,
    palette: Sequence[str],
    log: bool = False,
    lowest: bool = False,
) -> tuple[figure, tuple[float, float]]:
    """Return a heat map, a row for each curve, and the values of its first and last color.

    Args:
        log: whether colors follow the logarithm.
    """
    from bokeh.models import LinearColorMapper, LogColorMapper

    cells, edges = grid(lines, lowest=lowest)
    finite = cells[np.isfinite(cells) & ((cells > 0) | (not log))]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    if low == high:
        low, high = (low / 1.1, high * 1.1) if log else (low - 0.5, high + 0.5)
    mapper = (LogColorMapper if log else LinearColorMapper)(
        palette=list(palette), low=low, high=high, nan_color="rgba(128,128,128,0.18)"
    )
    height = int(min(520, max(120, 70 + 15 * len(lines))))
    chart = frame(height=height)
    # Columns are not all equally many steps: each is drawn as it is, in one image where they are.
    left, right = float(edges[0]), float(edges[-1])
    even = len(edges) < 3 or np.ptp(np.diff(edges)) <= max(1, 0.02 * (right - left))
    if even:
        source = {
            "v": [narrow(cells)],
            "x": [left],
            "y": [0],
            "w": [right - left],
            "h": [len(lines)],
        }
        drawn = chart.image("v", x="x", y="y", dw="w", dh="h", color_mapper=mapper, source=source)
        tip = '<div class="tip"><b>@v{0.[00000]}</b> $y{custom} <span>step $x{0,0}</span></div>'
    else:
        rows, columns = np.indices(cells.shape)
        source = {
            "v": narrow(cells.ravel()),
            "x0": edges[:-1][columns.ravel()],
            "x1": edges[1:][columns.ravel()],
            "y0": rows.ravel().astype(np.float32),
            "y1": rows.ravel().astype(np.float32) + 1,
        }
        drawn = chart.quad(
            left="x0",
            right="x1",
            bottom="y0",
            top="y1",
            source=source,
            line_alpha=0,
            fill_color={"field": "v", "transform": mapper},
        )
        tip = '<div class="tip"><b>@v{0.[00000]}</b> $y{custom} <span>from step @x0{0,0}</span></div>'
    label = CustomJSHover(
        args={"labels": [line.label for line in lines]}, code="return labels[Math.floor(value)] ?? ''"
    )
    chart.add_tools(HoverTool(renderers=[drawn], tooltips=tip, formatters={"$y": label}))
    chart.x_range, chart.y_range = Range1d(left, right), Range1d(len(lines), 0)
    chart.ygrid.grid_line_alpha = 0
    every = max(1, round(len(lines) * 15 / (height - 70)))
    shown = range(0, len(lines), every)
    chart.yaxis.ticker = [n + 0.5 for n in shown]
    chart.yaxis.major_label_overrides = {n + 0.5: lines[n].label for n in shown}
    return chart, (low, high)
