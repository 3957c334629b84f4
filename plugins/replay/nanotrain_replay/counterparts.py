"""The ranks that compute the same bits from the same microbatch."""

from __future__ import annotations

from collections.abc import Iterable

from nanotrain_core.api import Span
from nanotrain_core.api.torch import Mesh, Placement


def counterparts(mesh: Mesh, placements: Iterable[Placement]) -> tuple[int, ...]:
    """Return the ranks, this one included, that hold this rank's place in another replica. Collective.

    They are along ``dp`` and hold the same block of every parameter, experts included. Expert
    parallelism sends tokens of several data-parallel ranks through the same experts: two of its ranks see
    their own rows at other places of a GEMM, which may round otherwise, and are no counterparts. Ranks of
    other pipeline stages decide, too, since their experts see this rank's tokens.
    """
    layout, rank = mesh.layout, mesh.rank
    found = set(mesh.ranks("dp"))
    for placement in placements:
        span = placement.replica_span(layout)
        found &= set(layout.members(rank, Span(span.dims)))
    offsets = {other - rank for other in found}
    everyone = mesh.gather(offsets, "pp") if "pp" in layout.dims else [offsets]
    return tuple(sorted(rank + offset for offset in set.intersection(*everyone)))
