"""Which ranks communicate in a step: a rank's planned collectives, those of one place in the code as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import attrs

from nanotrain_plan.comms import axis_of
from nanotrain_plan.dry.origin import Origin
from nanotrain_plan.dry.phase import Phase
from nanotrain_plan.explain.owners import Owners
from nanotrain_plan.number_format import starred
from nanotrain_plan.stages import Stages

#: When something happens in a step, in order, and how it is told.
WHEN = {
    "counts": "before the first forward pass",
    "F": "in forward",
    "B": "in backward",
    "W": "in a pass of weight gradients",
    "sync": "in gradient sync, after backward",
    "update": "in the optimizer step",
    "balance": "after the optimizer step",
}


@attrs.define(frozen=True)
class Place:
    """What tells exchanges apart."""

    when: str
    op: str
    axis: str
    ranks: tuple[int, ...]
    origin: Origin | None
    """The caller, with the line of its first call."""


@attrs.define(frozen=True, kw_only=True)
class Exchanged:
    """All collectives of one place in one step of one rank."""

    place: Place
    count: int
    bytes: int
    modules: Sequence[str]
    """Whose forward was running, numbers of layers left out."""


def phases_named(stages: Stages, pp_rank: int) -> Iterator[tuple[str, Phase]]:
    """Yield what a rank does in a step, all microbatches, in order."""
    around = stages.step_of(pp_rank).around
    yield "counts", around["counts"]
    for action in stages.actions[pp_rank]:
        yield action.kind, stages.phase(pp_rank, action)
    for name in ("sync", "update", "balance"):
        yield name, around[name]


def exchanges(stages: Stages, pp_rank: int, owners: Owners) -> list[Exchanged]:
    """Return a rank's collectives of a step, each part of it in the order in which they happen."""
    counts: Counter[Place] = Counter()
    sizes: Counter[Place] = Counter()
    modules: dict[Place, dict[str, None]] = {}
    lines: dict[Place, Origin | None] = {}
    axes: dict[tuple[tuple[int, ...], str], str] = {}
    for when, phase in phases_named(stages, pp_rank):
        for found, origin, module in zip(phase.collectives, phase.origins, phase.callers, strict=True):
            key = found.ranks, found.op
            axis = axes.setdefault(key, axis_of(*key, stages.layout))
            axis = owners.axis(axis, found.ranks, origin, stages.layout)
            at = None if origin is None else attrs.evolve(origin, line=0)
            place = Place(when, found.op, axis, found.ranks, at)
            lines.setdefault(place, origin)
            counts[place] += 1
            sizes[place] += found.bytes
            if module:
                modules.setdefault(place, {})[starred(module)] = None
    order = list(WHEN)
    return [
        Exchanged(
            place=attrs.evolve(place, origin=lines[place]),
            count=number,
            bytes=sizes[place],
            modules=tuple(modules.get(place, ())),
        )
        for place, number in sorted(counts.items(), key=lambda item: order.index(item[0].when))
    ]


def flops_by_dtype(stages: Stages, pp_rank: int) -> Mapping[str, Counter[str]]:
    """Return FLOPs of a rank's step by pass and dtype; of attention those of whole scores."""
    found: dict[str, Counter[str]] = {}
    for when, phase in phases_named(stages, pp_rank):
        if phase.gemm_flops:
            found.setdefault(when, Counter()).update(phase.gemm_flops)
    return found


def recomputed(stages: Stages, pp_rank: int) -> tuple[int, int, list[str]]:
    """Return FLOPs of forward passes, those that backward passes compute again, and in which modules.

    Where no matrix product is made again, as with selective activation checkpointing, the modules are those
    whose other operators are.
    """
    forward, again = 0, 0
    products, others = dict[str, None](), dict[str, None]()
    for when, phase in phases_named(stages, pp_rank):
        if when == "F":
            forward += sum(phase.gemm_flops.values())
        elif when in "BW":
            again += sum(phase.flops_of.values())
            products |= {starred(name): None for (name, _), flops in phase.flops_of.items() if flops}
            others |= {starred(name): None for (name, _), moved in phase.bytes_of.items() if moved}
    return forward, again, list(products or others)
