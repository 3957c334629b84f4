"""The load of each expert, from histograms whose bins are experts: by layer at the end, and over steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from bokeh.models import CustomJSHover, HoverTool, LinearColorMapper, Range1d
from bokeh.plotting import figure

from nanotrain_report.blocks import Chart
from nanotrain_report.charts import frame, heat
from nanotrain_report.drawing import MAP, gradient
from nanotrain_report.families import Line, Values
from nanotrain_report.folder import Shown
from nanotrain_report.number_format import plural

if TYPE_CHECKING:
    from nanotrain_core.api.torch import Histogram

#: Rows up to which all experts of all layers are drawn over steps.
MOST_ROWS = 128


def load_charts(each: Shown, *, alone: bool) -> Iterator[Chart]:
    """Yield the loads of a run's experts, over their mean; nothing if they are not recorded."""
    found = {name: rows for name, rows in each.run.history.histograms.items() if _is_load(each, name, rows)}
    if not found:
        return
    title = "Load of experts" if alone else f"Load of experts of {each.label}"
    step = max(rows[-1][0] for rows in found.values())
    last = [over_mean(rows[-1][1]) for rows in found.values()]
    layers = [_layer(name) for name in found]
    note = "Tokens over the mean of the layer: 1 is balanced."
    busiest = max(zip(last, layers, strict=True), key=lambda pair: pair[0].max())
    words = (
        f"{plural(len(found), 'layer')}; the busiest expert is {int(busiest[0].argmax())} of {busiest[1]}, "
    )
    words += f"with {busiest[0].max():.3g} times the mean"
    high = max(float(load.max()) for load in last)
    ramp = ("0", gradient(MAP), f"{high:.3g}")
    drawn = by_layer(last, layers, high)
    yield Chart(f"{title}, step {step:,}", drawn, note, ramp=ramp, words=words, names=tuple(found))
    rows = [line for name, told in found.items() for line in _lines(_layer(name), told)]
    if len(rows) <= MOST_ROWS and len(next(iter(found.values()))) > 1:
        over_steps, (low, high) = heat(rows, unit="1", palette=MAP)
        ramp = (f"{low:.3g}", gradient(MAP), f"{high:.3g}")
        note = f"{note} A row is an expert; they are grouped by layer."
        yield Chart(f"{title}, over steps", over_steps, note, ramp=ramp, words=words, names=tuple(found))


def _is_load(each: Shown, name: str, rows: list[tuple[int, Histogram]]) -> bool:
    """Return whether a histogram's bins are experts: it is of the group ``moe``, and its edges count."""
    declared = next((m for m in each.run.declared if m.name == f"{name.rpartition('/')[0]}/{{router}}"), None)
    edges = rows[-1][1].edges
    counts = edges == tuple(float(n) for n in range(len(edges)))
    return counts and (declared.group == "moe" if declared else name.startswith("moe/"))


def over_mean(load: Histogram) -> Values:
    """Return the tokens of each expert over their mean [E]."""
    counts = np.array(load.counts)
    loads: Values = counts / max(counts.mean(), 1e-12)
    return loads


def _layer(name: str) -> str:
    return name.rpartition("/")[2].removesuffix(".router").removesuffix(".moe")


def _lines(layer: str, rows: list[tuple[int, Histogram]]) -> Iterator[Line]:
    loads = np.array([over_mean(load) for _, load in rows if len(load.counts) == len(rows[-1][1].counts)])
    steps = np.array([step for step, load in rows if len(load.counts) == len(rows[-1][1].counts)])
    for expert in range(loads.shape[1]):
        yield Line(f"{layer} {expert}", f"{layer} · {expert}", steps, loads[:, expert])


def by_layer(loads: list[Values], layers: list[str], high: float) -> figure:
    """Return a heat map with a row for each layer and a column for each expert."""
    experts = max(map(len, loads))
    cells = np.full((len(loads), experts), np.nan, dtype=np.float32)
    for row, load in enumerate(loads):
        cells[row, : len(load)] = load
    chart = frame(height=int(min(520, max(150, 70 + 26 * len(loads)))), x_unit="expert")
    mapper = LinearColorMapper(palette=list(MAP), low=0, high=high, nan_color="rgba(128,128,128,0.18)")
    data = {"v": [cells], "x": [-0.5], "y": [0], "w": [experts], "h": [len(loads)]}
    drawn = chart.image("v", x="x", y="y", dw="w", dh="h", color_mapper=mapper, source=data)
    tip = '<div class="tip"><b>@v{0.00}</b> times the mean, expert $x{0} of $y{custom}</div>'
    label = CustomJSHover(args={"labels": layers}, code="return labels[Math.floor(value)] ?? ''")
    chart.add_tools(HoverTool(renderers=[drawn], tooltips=tip, formatters={"$y": label}))
    chart.x_range, chart.y_range = Range1d(-0.5, experts - 0.5), Range1d(len(loads), 0)
    chart.ygrid.grid_line_alpha = 0
    shown = range(0, len(loads), max(1, len(loads) // 24))
    chart.yaxis.ticker = [row + 0.5 for row in shown]
    chart.yaxis.major_label_overrides = {row + 0.5: layers[row] for row in shown}
    return chart
