"""The pipeline's timeline, drawn from the schedule of the recipe: what ``nanotrain schedule`` prints.

Of a run in phases it is that of its newest step's batch.
"""

from __future__ import annotations

import attrs
import numpy as np
from bokeh.models import ColumnDataSource, HoverTool, Range1d

from nanotrain_core.api import (
    NanotrainError,
    PhaseTimeline,
    Timeline,
    microbatches_of,
    resolve_recipe,
    simulate,
)
from nanotrain_report.blocks import Block, Chart, Key, Missing
from nanotrain_report.charts import COLORS, frame
from nanotrain_report.folder import Shown
from nanotrain_report.number_format import share

KINDS = {"F": ("forward", COLORS[0]), "B": ("backward", COLORS[1]), "W": ("weight gradients", COLORS[2])}
#: Actions up to which each is labeled with its microbatch.
MOST_LABELS = 160


def timeline_of(each: Shown, *, alone: bool) -> list[Block]:
    """Return the timeline of a run's schedule; nothing without a pipeline."""
    path = each.run.recipe_file
    if path is None or each.run.recipe.get("topology", {}).get("pp", 1) == 1:
        return []
    try:
        found = resolve_recipe(path, overrides=["monitor=[]"])  # theirs may not be installed here
        steps = max(1, each.run.step)
        phases = PhaseTimeline(found.recipe)
        *_, now = phases.stretches(steps)
        batch = phases.with_batch(now.phase, now.sequences).batch
        recipe = attrs.evolve(found.recipe, batch=batch)
        pp, microbatches = found.layout.degree("pp"), microbatches_of(recipe, found.layout)
        timeline = simulate(found.registry.build(found.recipe.schedule).actions(pp, microbatches))
    except (NanotrainError, ValueError) as error:
        return [Missing(f"The schedule cannot be drawn: {str(error).splitlines()[0]}")]
    of_batch = f" of a batch of {now.sequences} sequences" if recipe.phase else ""
    of_run = "" if alone else f", {each.label}"
    title = f"{recipe.schedule.use}: {pp} stages' ranks, {microbatches} microbatches{of_batch}{of_run}"
    bubble, measured = each.run.line("bubble"), ""
    if bubble is not None:
        alike = bubble.values[bubble.steps > steps - now.steps]  # of steps with as large a batch
        alike = alike[np.isfinite(alike)]
        measured = f"; measured {share(float(np.median(alike)))}, median" if len(alike) else ""
    ideal = f"Bubble {share(timeline.bubble())} on paper{measured}."
    note = f"{ideal} On paper a forward takes one unit of time and a backward two; numbers are microbatches."
    kinds = {slot.action.kind for row in timeline.rows for slot in row}
    keys = [Key(name, color) for kind, (name, color) in KINDS.items() if kind in kinds]
    return [Chart(title, draw(timeline), note, keys, words=note, wide=True, names=("schedule",))]


def draw(timeline: Timeline) -> "figure":  # type: ignore[name-defined] # noqa: F821, UP037
    """Return a figure with a row for each pipeline rank and a bar for each action."""
    slots = [(rank, slot) for rank, row in enumerate(timeline.rows) for slot in row]
    several = any(len(timeline.stages(rank)) > 1 for rank in range(len(timeline.rows)))
    source = ColumnDataSource(
        {
            "left": [slot.start for _, slot in slots],
            "right": [slot.end for _, slot in slots],
            "middle": [(slot.start + slot.end) / 2 for _, slot in slots],
            "row": [rank + 0.5 for rank, _ in slots],
            "color": [KINDS[slot.action.kind][1] for _, slot in slots],
            # The later one of a rank's stages is paler, as in papers on interleaved schedules.
            "alpha": [0.9 - 0.45 * (_place(timeline, rank, slot.action.stage) % 2) for rank, slot in slots],
            "text": [str(slot.action.microbatch) for _, slot in slots],
            "what": [
                f"{KINDS[slot.action.kind][0]} of microbatch {slot.action.microbatch}" for _, slot in slots
            ],
            "stage": [slot.action.stage for _, slot in slots],
        }
    )
    ranks = len(timeline.rows)
    chart = frame(height=90 + 30 * ranks, x_unit="units of time")
    bars = chart.hbar(
        y="row",
        left="left",
        right="right",
        height=0.82,
        color="color",
        fill_alpha="alpha",
        line_alpha=0,
        source=source,
    )
    if len(slots) <= MOST_LABELS:
        chart.text(
            "middle",
            "row",
            "text",
            source=source,
            text_align="center",
            text_baseline="middle",
            text_font_size="11px",
            text_color="#ffffff",
        )
    stage = "<span>stage @stage</span>" if several else ""
    tip = f'<div class="tip"><b>@what</b> {stage}<span>from @left to @right</span></div>'
    chart.add_tools(HoverTool(renderers=[bars], tooltips=tip))
    chart.y_range = Range1d(ranks, 0)
    chart.x_range = Range1d(0, timeline.makespan)
    chart.yaxis.ticker = [rank + 0.5 for rank in range(ranks)]
    chart.yaxis.major_label_overrides = {
        r + 0.5: f"rank {r} · {share(timeline.bubble(r))} idle" for r in range(ranks)
    }
    chart.min_border_left = 120
    chart.ygrid.grid_line_alpha = 0
    return chart


def _place(timeline: Timeline, rank: int, stage: int) -> int:
    return timeline.stages(rank).index(stage)
