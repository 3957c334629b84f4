"""Tables of a plan's page for which a terminal has no room: those of every kind of pipeline rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from nanotrain_plan.activation_words import told_activations, told_layers, told_stages, told_tensor
from nanotrain_plan.comms import AxisTraffic
from nanotrain_plan.memory import StageActivations, activations_by_stage
from nanotrain_plan.number_format import spans
from nanotrain_plan.plan import Plan, largest
from nanotrain_plan.rendering.page import table
from nanotrain_plan.rendering.parts import Bytes, Seconds, Table

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
            yield f"<h3>Pipeline rank{'s' if len(alike) > 1 else ''} {spans(alike)}</h3>"
        yield table(_collectives(plan.traffic[like])) if plan.traffic[like] else "<p>none</p>"


def activations(plan: Plan) -> Iterator[str]:
    """Yield what a microbatch keeps for backward in every stage, of those that are alike once."""
    yield "<h2>Activations of a microbatch</h2>"
    for found in activations_by_stage(plan.stages):
        if len(plan.stages.parts) > 1:
            yield f"<h3>{escape(told_stages(found).capitalize())}</h3>"
        yield f"<p>{escape(told_activations(found))}<br><small>{escape(told_layers(found))}</small></p>"
        yield f"<details><summary>tensors</summary>{table(_tensors(found))}</details>"


def _tensors(found: StageActivations) -> Table:
    columns = ("module", "from", "shape", "dtype", "each", "number", "in all", "")
    rows = [
        (
            *told_tensor(each),
            Bytes(each.bytes),
            each.count,
            Bytes(each.bytes * each.count),
            "recomputable" if each.recomputable else "",
        )
        for each in largest(found.tensors)
    ]
    return Table(columns, rows)


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
