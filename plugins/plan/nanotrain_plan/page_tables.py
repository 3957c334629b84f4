"""Tables of a plan's page for which a terminal has no room: those of every kind of pipeline rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from nanotrain_plan.comms import AxisTraffic
from nanotrain_plan.plan import Plan
from nanotrain_plan.telling.page import table
from nanotrain_plan.telling.parts import Bytes, Seconds, Table
from nanotrain_plan.words import spans

STYLE = """
table { border-collapse: collapse; font-size: .85rem; margin: .4rem 0 1rem } .wide { overflow-x: auto }
th, td { text-align: left; padding: .1rem .9rem .1rem 0; border-bottom: 1px solid #8886; vertical-align: top }
th { font-weight: 500; opacity: .7 } td.n, th.n { text-align: right; white-space: nowrap }
h3 { font-size: .95rem; font-weight: 600; margin: 1rem 0 0 }
"""


def collectives(plan: Plan) -> Iterator[str]:
    """Yield a heading and the collectives of a step, of every kind of pipeline rank that has any."""
    if not any(plan.traffic.values()):
        return
    yield "<h2>Collectives of a rank in a step</h2>"
    for like, alike in plan.stages.kinds().items():
        if plan.stages.pp > 1:
            yield f"<h3>{escape(named('pipeline rank', alike))}</h3>"
        yield table(_collectives(plan.traffic[like])) if plan.traffic[like] else "<p>none</p>"


def named(what: str, numbers: Sequence[int]) -> str:
    """Return what is numbered, with its numbers.

    >>> named("stage", [1, 2, 3]), named("stage", [4])
    ('stages 1 to 3', 'stage 4')
    """
    return f"{what}{'s' if len(numbers) > 1 else ''} {spans(numbers)}"


def _collectives(found: Sequence[AxisTraffic]) -> Table:
    columns = ("axis", "collective", "ranks", "count", "bytes", "time", "not hidden")
    rows = [
        (
            each.axis,
            each.op.replace("_", "-"),
            each.size,
            each.count,
            Bytes(each.bytes),
            Seconds(each.seconds),
            Seconds(each.exposed) if each.exposed else None,
        )
        for each in sorted(found, key=lambda each: -each.seconds)
    ]
    return Table(columns, rows)
