"""Drawings: the grid of ranks, blocks of matrices, the pipeline, communication. SVG, and lines of text.

Colors are classes (``c0`` to ``c5``), which the page's style fills for light and dark.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from nanotrain_core.api import Layout, Timeline
from nanotrain_plan.explain.communication import Exchanged
from nanotrain_plan.explain.subject import Alike
from nanotrain_plan.rendering.parts import Picture

#: Pixels.
WIDTH, CELL, ROW = 900, 44, 26

#: Ranks of a stage that are drawn one by one; of more the first.
MOST = 64

Block = tuple[tuple[int, ...], tuple[int, ...]]


def svg(width: float, height: float, parts: Sequence[str], title: str) -> str:
    """Return a drawing that grows with the page."""
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" style="max-width:{width:.0f}px" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}</svg>'
    )


def text(x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> str:
    """Return words at a place."""
    chosen = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{chosen}>{escape(words)}</text>'


def rect(x: float, y: float, wide: float, high: float, kind: str, title: str = "") -> str:
    """Return a rectangle that tells its title under the pointer."""
    told = f"<title>{escape(title)}</title>" if title else ""
    at = f'x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}"'
    return f'<rect {at} class="{kind}">{told}</rect>'


# --- ranks -------------------------------------------------------------------------------------------


def grid(layout: Layout) -> Picture:
    """Return the ranks: a row for each pipeline rank, with their coordinates in each view."""
    rows = _rows(layout)
    columns = max(len(row) for row in rows)
    parts, lines = [], []
    for y, row in enumerate(rows):
        parts.append(text(0, y * CELL + 27, f"pp {y}" if len(rows) > 1 else ""))
        for x, rank in enumerate(row):
            where = coordinates(layout, rank)
            color = _color(layout, rank)
            left, top = 50 + x * CELL, y * CELL + 2
            parts.append(rect(left, top, CELL - 4, CELL - 4, f"c{color} cell", f"rank {rank}: {where}"))
            parts.append(text(left + CELL / 2 - 2, top + 25, str(rank), "middle", "on"))
    for rank in range(min(layout.world_size, MOST)):
        lines.append(f"rank {rank:3}: {coordinates(layout, rank)}")
    if layout.world_size > MOST:
        lines.append(f"... and {layout.world_size - MOST:,} more")
    title = "Ranks: a row for each pipeline rank, a color for each place among those that split a matrix"
    return Picture(title, svg(60 + columns * CELL, len(rows) * CELL, parts, title), lines)


def _rows(layout: Layout) -> list[list[int]]:
    pp = layout.degree("pp")
    rows: list[list[int]] = [[] for _ in range(pp)]
    for rank in range(layout.world_size):
        row = rows[layout.coordinate(rank, "pp") if pp > 1 else 0]
        if len(row) < MOST // 4 or layout.world_size <= MOST:
            row.append(rank)
    return rows


def coordinates(layout: Layout, rank: int) -> str:
    """Return where a rank stands: ``pp 0, dp 1, tp 0 | edp 0, ep 1``."""
    views = []
    told: set[str] = set()
    for view in layout.views.values():
        dims = [dim for dim in view.dims if view.size(dim) > 1 and dim not in told]
        told |= {*dims}
        views.append(", ".join(f"{dim} {view.coordinate(rank, dim)}" for dim in dims))
    return " | ".join(filter(None, views)) or "alone"


def _color(layout: Layout, rank: int) -> int:
    """Return a color by what of a dense matrix a rank holds: its place along what is no data dimension."""
    dims = [dim for dim in layout.views["dense"].dims if dim not in ("pp", *layout.data_dims)]
    return layout.coordinate(rank, *dims) % 6 if dims else 0


# --- blocks ------------------------------------------------------------------------------------------


def blocks(rank: int, drawn: Sequence[Alike], others: Mapping[str, Mapping[int, Block]]) -> Picture:
    """Return matrices with the blocks of a rank and of its neighbors in their places."""
    parts, lines, x, y, high = list[str](), list[str](), 0.0, 0.0, 0.0
    for each in drawn:
        p = each.first.placement
        rows, columns = (*p.global_shape, 1)[:2]
        tall = 20 + 90 * min(1.0, rows / max(rows, columns))
        wide = 20 + 90 * min(1.0, columns / max(rows, columns))
        if x + 220 > WIDTH:
            x, y, high = 0.0, y + high + 50, 0.0
        parts.append(text(x, y + 12, each.name, kind="small"))
        parts.append(rect(x, y + 20, wide, tall, "whole", f"{each.name}: {list(p.global_shape)}"))
        held = {**others[each.name], rank: (p.offset, p.shape)}
        for number, (who, (offset, shape)) in enumerate(sorted(held.items())):
            r0, c0 = (*offset, 0)[:2]
            rn, cn = (*shape, 1)[:2]
            at = x + c0 / columns * wide, y + 20 + r0 / rows * tall
            size = cn / columns * wide, rn / rows * tall
            span = f"rank {who}: offset {list(offset)}, shape {list(shape)}"
            parts.append(rect(*at, *size, f"c{number % 6} cell", span))
            parts.append(text(at[0] + size[0] / 2, at[1] + size[1] / 2 + 4, str(who), "middle", "on"))
            lines.append(f"{each.name} {list(p.global_shape)}: {span}")
        parts.append(text(x, y + 36 + tall, " x ".join(map(str, p.global_shape)), kind="small"))
        x, high = x + 220, max(high, tall)
    title = (
        f"Blocks of rank {rank} and of its neighbors, where they lie in the whole tensors (first two axes)"
    )
    return Picture(title, svg(WIDTH, y + high + 50, parts, title), lines)


# --- pipeline ----------------------------------------------------------------------------------------


def pipeline(timeline: Timeline, lines: Sequence[str]) -> Picture:
    """Return the schedule: a row for each pipeline rank, a bar for each pass."""
    kinds = {"F": "c0", "B": "c1", "W": "c2"}
    scale = (WIDTH - 60) / timeline.makespan
    parts = []
    for number, row in enumerate(timeline.rows):
        parts.append(text(0, number * ROW + 17, f"pp {number}"))
        for slot in row:
            x, wide = 60 + slot.start * scale, (slot.end - slot.start) * scale
            parts.append(
                rect(
                    x,
                    number * ROW + 2,
                    max(0.4, wide - 0.6),
                    ROW - 4,
                    kinds[slot.action.kind],
                    str(slot.action),
                )
            )
            if wide > 16:
                label = str(slot.action.microbatch)
                parts.append(text(x + wide / 2, number * ROW + 17, label, "middle", "on"))
    title = (
        f"{timeline.makespan:g} units of time, a forward one and a whole backward two: forward (blue), "
        "backward (orange), weight gradients (green); numbers are microbatches"
    )
    return Picture(title, svg(WIDTH, ROW * len(timeline.rows), parts, title), lines)


# --- communication -----------------------------------------------------------------------------------


def communication(layout: Layout, found: Mapping[int, Sequence[Exchanged]]) -> Picture:
    """Return which ranks the first rank of each told pipeline rank exchanges with, a row for each axis."""
    parts, y = list[str](), 0
    rows = _rows(layout)
    shown = sorted({rank for row in rows for rank in row})[:MOST]
    step = min(CELL, (WIDTH - 260) / max(1, len(shown)))
    for number, rank in enumerate(shown):
        parts.append(text(260 + (number + 0.5) * step, 12, str(rank), "middle", "small"))
    for pp_rank, exchanges in found.items():
        for axis, ranks, size in _groups(exchanges):
            y += ROW
            parts.append(text(0, y + 12, f"pp {pp_rank}, {axis}: {size}", kind="small"))
            inside = [260 + (shown.index(rank) + 0.5) * step for rank in ranks if rank in shown]
            if len(inside) > 1:
                ends = f'x1="{inside[0]:.1f}" x2="{inside[-1]:.1f}" y1="{y + 8}" y2="{y + 8}"'
                parts.append(f'<line {ends} class="link"/>')
            parts.extend(f'<circle cx="{x:.1f}" cy="{y + 8}" r="6" class="c{_hue(axis)}"/>' for x in inside)
    title = "Which ranks communicate in a step: a row for each group of ranks, its axis and its bytes"
    return Picture(title, svg(WIDTH, y + ROW, parts, title))


def _groups(exchanges: Sequence[Exchanged]) -> Iterator[tuple[str, tuple[int, ...], str]]:
    total: dict[tuple[str, tuple[int, ...]], int] = {}
    for each in exchanges:
        key = each.place.axis, each.place.ranks
        total[key] = total.get(key, 0) + each.bytes
    for (axis, ranks), size in total.items():
        from nanotrain_plan.number_format import size as told

        yield axis, ranks, told(size)


def _hue(axis: str) -> int:
    return sum(map(ord, axis)) % 6
