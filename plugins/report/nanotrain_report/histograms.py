"""Histograms over steps: a column for each, brighter where more elements are."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
from bokeh.models import HoverTool, LinearColorMapper, Range1d

from nanotrain_report.blocks import Chart
from nanotrain_report.charts import frame
from nanotrain_report.drawing import MAP, gradient
from nanotrain_report.folder import Shown
from nanotrain_report.sampling import MOST_COLUMNS

#: Histograms of a report: there may be one for each parameter.
MOST = 24


def histogram_charts(each: Shown, drawn_already: Collection[str], *, alone: bool) -> Iterator[Chart]:
    """Yield a heat map for each histogram that no section has drawn, bins by steps."""
    left = [(name, rows) for name, rows in each.run.history.histograms.items() if name not in drawn_already]
    for name, found in left[:MOST]:
        rows = found[:: max(1, -(-len(found) // MOST_COLUMNS))]
        edges = np.array(rows[-1][1].edges)
        counts = np.array([one.counts for _, one in rows if one.edges == rows[-1][1].edges]).T
        shares = counts / np.maximum(counts.sum(axis=0), 1)
        log = bool((edges > 0).all())
        bins = np.log10(edges) if log else edges
        steps = np.array([step for step, one in rows if one.edges == rows[-1][1].edges])
        chart = frame(height=200)
        mapper = LinearColorMapper(palette=list(MAP), low=0, high=float(shares.max() or 1))
        width = float(steps[-1] - steps[0]) or 1.0
        data = {
            "v": [shares.astype(np.float32)],
            "x": [steps[0]],
            "y": [bins[0]],
            "w": [width],
            "h": [np.ptp(bins)],
        }
        drawn = chart.image("v", x="x", y="y", dw="w", dh="h", color_mapper=mapper, source=data)
        power = "10^" if log else ""
        tip = f'<div class="tip"><b>@v{{0.0%}}</b> <span>at {power}$y{{0.00}}, step $x{{0,0}}</span></div>'
        chart.add_tools(HoverTool(renderers=[drawn], tooltips=tip))
        chart.x_range, chart.y_range = Range1d(steps[0], steps[0] + width), Range1d(bins[0], bins[-1])
        note = "Share of elements in each bin" + (", by the power of ten of their magnitude." if log else ".")
        title = name if alone else f"{name} of {each.label}"
        words = f"{name}: {len(rows)} histograms of {len(edges) - 1} bins"
        yield Chart(
            title, chart, note, ramp=("0%", gradient(MAP), f"{shares.max():.1%}"), words=words, names=(name,)
        )
