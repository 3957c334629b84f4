"""A replica of a model that is spread over ranks without gradients, and the rank that speaks for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nanotrain_core.api import Layout, Span
from nanotrain_core.api.torch import Run


class Replica:
    """The ranks that together hold this rank's copy of the model. Attributes, the same on all of them:

    ``count``
        replicas of the model in the run.
    ``index``
        of this one.
    ``group``
        process group of its ranks; None for one rank.
    ``speaker``
        the rank that has logits of the last stage, and tells the others what follows from them.
    ``passes_together``
        whether a pass of one replica may need the others, since experts are spread over them: then all go
        through as many passes.
    """

    def __init__(self, run: Run) -> None:
        """Make groups. Collective over the run."""
        mesh, layout = run.mesh, run.mesh.layout
        dense = layout.views["dense"].dims
        data = tuple(dim for dim in dense if dim in layout.data_dims)
        self.count, self.index = layout.size(*data), layout.coordinate(mesh.rank, *data)
        inside = tuple(dim for dim in dense if dim not in data)
        mesh.agree_on_groups([Span(inside)])
        self.group = mesh.group_of(Span(inside))
        last = {dim: run.owners[-1] if dim == "pp" else 0 for dim in inside}
        self.speaker = next(
            rank
            for rank in layout.members(mesh.rank, Span(inside))
            if all(layout.coordinate(rank, dim) == place for dim, place in last.items())
        )
        self.passes_together = self.count > 1 and any_exchange_between_replicas(layout)


def any_exchange_between_replicas(layout: Layout) -> bool:
    """Return whether experts are spread over replicas."""
    apart = {*layout.views["dense"].dims, "edp"}
    return any(layout.size(dim) > 1 for dim in layout.dims if dim not in apart)


def rounds(items: int, replicas: int) -> Iterator[Sequence[int]]:
    """Yield which item each replica of the model takes; in the last round some repeat its first.

    >>> list(rounds(5, 2))
    [[0, 1], [2, 3], [4, 4]]
    """
    for first in range(0, items, replicas):
        yield [n if n < items else first for n in range(first, first + replicas)]
