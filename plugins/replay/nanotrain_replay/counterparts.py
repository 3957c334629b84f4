"""The ranks that compute the same bits from the same microbatch."""

from __future__ import annotations

from collections.abc import Iterable

from nanotrain_core.api import Span
from nanotrain_core.api.torch import Mesh, Placement


def counterparts(mesh: Mesh, placements: Iterable[Placement]) -> tuple[int, ...]:
    """Return the ranks, this one included, that hold this rank's place in another replica. Collective.

    They read different sequences and hold the same block of every parameter, experts included. Expert
    parallelism sends tokens of several data-parallel ranks through the same experts: the rows of two of these
    ranks are at different positions of a GEMM, which may round them differently, so such ranks are not
    counterparts. Other pipeline stages count as well, since their experts process this rank's tokens.
    """
    layout, rank = mesh.layout, mesh.rank
    found = set(mesh.ranks(*layout.row_dims))
    for placement in placements:
        span = placement.replica_span(layout)
        found &= set(layout.members(rank, Span(span.dims)))
    offsets = {other - rank for other in found}
    everyone = mesh.gather(offsets, "pp") if "pp" in layout.dims else [offsets]
    return tuple(sorted(rank + offset for offset in set.intersection(*everyone)))
