"""The output of ``nanotrain run --show`` before a run begins: which rank holds which block of the model."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from nanotrain_core.compose import Run
from nanotrain_core.layout.placement import Placement
from nanotrain_core.layout.roles import natural_sort_key

COLUMNS = ("parameter", "whole", "block", "view", "on ranks", "gradient summed over")


@attrs.define(frozen=True)
class Held:
    """One block of one parameter, on one rank."""

    name: str
    whole: tuple[int, ...]
    block: tuple[tuple[int, int], ...]
    """First and last row, column, ... of the block, as half-open ranges."""
    view: str
    summed: str
    rank: int


def show_placements(run: Run) -> None:
    """Print the block of every parameter on every rank, on rank 0. Collective over the world."""
    mesh = run.mesh
    mine = [_held(each.placement, each.parameter.requires_grad, run) for each in run.placed]
    everyone = mesh.gather(mine)
    if mesh.rank == 0:
        print_table(_rows(held for rank in everyone for held in rank))


def _held(placement: Placement, trained: bool, run: Run) -> Held:
    block = tuple((o, o + n) for o, n in zip(placement.offset, placement.shape, strict=True))
    summed = (str(placement.sync_span(run.mesh.layout)) or "-") if trained else "no gradient"
    return Held(placement.name, placement.global_shape, block, placement.view, summed, run.mesh.rank)


def _rows(held: Iterable[Held]) -> list[tuple[str, ...]]:
    """Gather the ranks of each block, and sort by layer, parameter and offset."""
    ranks: dict[Held, list[int]] = {}
    for each in held:
        ranks.setdefault(attrs.evolve(each, rank=-1), []).append(each.rank)
    ordered = sorted(ranks, key=lambda each: (natural_sort_key(each.name), each.block))
    return [
        (
            each.name,
            "x".join(map(str, each.whole)) or "scalar",
            ", ".join(f"{first}:{last}" for first, last in each.block),
            each.view,
            " ".join(map(str, ranks[each])),
            each.summed,
        )
        for each in ordered
    ]


def print_table(rows: list[tuple[str, ...]]) -> None:
    """Print rows under :data:`COLUMNS`."""
    widths = [max(len(row[i]) for row in [COLUMNS, *rows]) for i in range(len(COLUMNS))]
    for row in [COLUMNS, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
