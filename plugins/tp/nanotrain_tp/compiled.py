"""Collectives inside a compiled graph: torch's functional collectives, which are nodes of the graph.

A graph cannot contain the others: communication through shared memory, handles of
collectives in flight. The compiler decides when one begins and when it is waited for.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives  # registers their shapes

from nanotrain_tp.collectives import Ranks, _cut, _joined, _padded, _shortened

_OPS: Any = torch.ops._c10d_functional


class RanksInGraph(Ranks):
    """The counterpart of :class:`Ranks` where dynamo traces it."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks.mesh)
        group = ranks.mesh.group("tp")
        assert group is not None, "tp = 1 has no collectives"
        self.name = group.group_name
        """Name of their process group, by which a graph identifies it."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of every rank's ``x``."""
        return _ended(_OPS.all_reduce(x.contiguous(), "sum", self.name))

    def all_gather(self, x: torch.Tensor, dim: int, length: int | None = None) -> torch.Tensor:
        """Return every rank's ``x``, concatenated along ``dim``. See :meth:`Ranks.all_gather`."""
        dim %= x.dim()
        sizes = self.share_sizes(x, dim, length)
        share = _padded(x, dim, max(sizes)).contiguous()
        pieces = _ended(_OPS.all_gather_into_tensor(share, self.size, self.name))
        return _joined(pieces.view(self.size, *share.shape), dim, sizes)

    def reduce_scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's share of the sum of every rank's ``x``."""
        dim %= x.dim()
        sizes = self.sizes(x.shape[dim])
        shares = _cut(x, dim, sizes)
        total = _ended(_OPS.reduce_scatter_tensor(shares.flatten(0, 1), "sum", self.size, self.name))
        return _shortened(total.view(shares.shape[1:]), dim, sizes[self.index])


def _ended(begun: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _OPS.wait_tensor(begun)
    return result
