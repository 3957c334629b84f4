"""A plan as one HTML page without scripts: the tables, memory as bars, the pipeline's timeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from io import StringIO

from rich.console import Console

from nanotrain_plan import page_tables
from nanotrain_plan.advice import Advice
from nanotrain_plan.memory import RankMemory
from nanotrain_plan.number_format import duration, size
from nanotrain_plan.plan import Plan
from nanotrain_plan.show import HOLDERS, show

#: Pixels of a picture.
WIDTH, ROW = 1100, 22

#: Of holders of memory, in their order; and of a timeline's actions.
COLORS = ("#4c78a8", "#72b7b2", "#54a24b", "#eeca3b", "#f58518", "#b279a2", "#e45756")
ACTIONS = {"F": "#4c78a8", "B": "#f58518", "W": "#54a24b"}

STYLE = """
body { font: 15px system-ui, sans-serif; margin: 2rem auto; max-width: 1140px; color: #222; background: #fff }
h1, h2 { font-weight: 600 } h2 { margin-top: 2rem; font-size: 1.1rem }
pre { font: 12.5px/1.35 ui-monospace, monospace; overflow-x: auto }
svg text { font: 11px system-ui, sans-serif; fill: #333 } .key { display: inline-block; margin-right: 1rem }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .35em }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #16181c } svg text { fill: #ccc } }
"""


def page(plan: Plan, advice: Sequence[Advice] | None) -> str:
    """Return the page."""
    name = escape(plan.recipe.run.name)
    told = StringIO()
    show(
        plan, advice, Console(file=told, width=150, highlight=False, markup=False, emoji=False, no_color=True)
    )
    body = [
        f"<h1>{name} on {plan.ranks} x {escape(plan.hardware.name)}</h1>",
        "<h2>Memory of each pipeline rank at its peak</h2>",
        _keys(dict(zip(HOLDERS, COLORS, strict=True))),
        "".join(_memory(plan)),
        f"<h2>A step of {duration(plan.time.pipeline)}, bubble {plan.time.bubble:.1%}</h2>",
        _keys({"forward": ACTIONS["F"], "backward": ACTIONS["B"], "weight gradients": ACTIONS["W"]}),
        "".join(_timeline(plan)),
        *page_tables.activations(plan),
        *page_tables.collectives(plan),
        f"<h2>All of it</h2><pre>{escape(told.getvalue())}</pre>",
    ]
    head = f"<meta charset=utf-8><title>{name}: plan</title><style>{STYLE}{page_tables.STYLE}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(body)}</body></html>\n"


def _keys(colors: dict[str, str]) -> str:
    spans = [f'<span class=key><i style="background:{c}"></i>{name}</span>' for name, c in colors.items()]
    return f"<p>{''.join(spans)}</p>"


def _memory(plan: Plan) -> Iterator[str]:
    usable = plan.hardware.usable
    widest = max(usable, plan.worst.peak)
    scale = (WIDTH - 220) / widest
    yield f'<svg viewBox="0 0 {WIDTH} {ROW * len(plan.memory) + 20}" role=img>'
    for row, rank in enumerate(plan.memory):
        yield from _bar(rank, row * ROW, scale)
    x = 60 + usable * scale
    height = ROW * len(plan.memory)
    yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}" stroke="#e45756" stroke-dasharray="4"/>'
    yield f'<text x="{x:.1f}" y="{height + 14}" text-anchor="middle">usable {size(usable)}</text></svg>'


def _bar(rank: RankMemory, y: int, scale: float) -> Iterator[str]:
    yield f'<text x="0" y="{y + 15}">pp {rank.pp_rank}</text>'
    x = 60.0
    for holder, color in zip(HOLDERS, COLORS, strict=True):
        wide = rank.held.get(holder, 0) * scale
        title = f"<title>{holder}: {size(rank.held.get(holder, 0))}</title>"
        yield f'<rect x="{x:.1f}" y="{y + 3}" width="{wide:.1f}" height="{ROW - 6}" fill="{color}">'
        yield f"{title}</rect>"
        x += wide
    yield f'<text x="{x + 6:.1f}" y="{y + 15}">{size(rank.peak)} at {escape(rank.where)}</text>'


def _timeline(plan: Plan) -> Iterator[str]:
    rows, makespan = plan.time.timeline.rows, plan.time.timeline.makespan
    scale = (WIDTH - 60) / makespan if makespan else 0.0
    yield f'<svg viewBox="0 0 {WIDTH} {ROW * len(rows)}" role=img>'
    for number, row in enumerate(rows):
        y = number * ROW
        yield f'<text x="0" y="{y + 15}">pp {number}</text>'
        for slot in row:
            x, wide = 60 + slot.start * scale, max(0.4, (slot.end - slot.start) * scale - 0.3)
            color = ACTIONS[slot.action.kind]
            title = f"<title>{slot.action}: {duration(slot.end - slot.start)}</title>"
            yield f'<rect x="{x:.2f}" y="{y + 2}" width="{wide:.2f}" height="{ROW - 4}" fill="{color}">'
            yield f"{title}</rect>"
    yield "</svg>"
