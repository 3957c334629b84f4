"""The process groups of one rank: a :class:`~nanotrain_core.layout.Layout` made real.

Every group is named after its dimensions and has the run's timeout. A rank creates only the groups
it is a member of, so a mesh costs the same on 8 ranks and on 16,384.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from nanotrain_core.layout import Layout

Dims = tuple[str, ...]


class Mesh:
    """This rank's coordinates and groups. All methods that talk are no-ops along size 1."""

    def __init__(
        self,
        layout: Layout,
        *,
        rank: int = 0,
        device: torch.device | str = "cpu",
        timeout: timedelta = timedelta(minutes=5),
    ) -> None:
        self.layout = layout
        self.rank = rank
        self.device = torch.device(device)
        self._timeout = timeout
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self.create_groups((dim,) for dim in layout.dims)

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    def size(self, *dims: str) -> int:
        return self.layout.size(*dims)

    def coordinate(self, *dims: str) -> int:
        """Return this rank's position along ``dims`` taken together."""
        return self.layout.coordinate(self.rank, *dims)

    def ranks(self, *dims: str) -> tuple[int, ...]:
        """Return the global ranks of this rank's group along ``dims``, ascending."""
        return self.layout.ranks(self.rank, *dims)

    def create_groups(self, wanted: Iterable[Dims]) -> None:
        """Create this rank's groups along each of ``wanted``. Collective over those groups' members.

        Ranks must agree on the order of what they share; :meth:`agree_on_groups` sees to it where
        the wishes come from parameters, which differ between pipeline stages.
        """
        for dims in wanted:
            ranks = self.ranks(*dims)
            if len(ranks) in (1, self.world_size) or ranks in self._groups:
                continue
            self._groups[ranks] = dist.new_group(
                list(ranks),
                timeout=self._timeout,
                use_local_synchronization=True,
                group_desc="+".join(dims),
            )

    def agree_on_groups(self, wanted: Iterable[Dims]) -> None:
        """Create the union of what all ranks want, in one order. Collective over the world."""
        mine = {dims for dims in wanted if self.size(*dims) > 1}
        everyone: list[set[Dims]] = [mine]
        if self.world_size > 1:
            everyone = [set()] * self.world_size
            dist.all_gather_object(everyone, mine)
        self.create_groups(sorted(set().union(*everyone)))

    def group(self, *dims: str) -> dist.ProcessGroup | None:
        """Return the group along ``dims``, or None when it has one member.

        Raises:
            KeyError: several dimensions together were never asked for before training began.
        """
        ranks = self.ranks(*dims)
        if len(ranks) == 1:
            return None
        if len(ranks) == self.world_size:
            return dist.group.WORLD
        if ranks not in self._groups:
            raise KeyError(f"no process group along {'+'.join(dims)}: ask for it with agree_on_groups first")
        return self._groups[ranks]

    def all_reduce(self, tensor: torch.Tensor, *dims: str, op: dist.ReduceOp.RedOpType | None = None) -> None:
        """Reduce ``tensor`` in place over ``dims``, or over the world if none are named. SUM by default."""
        group = self.group(*dims) if dims else (dist.group.WORLD if self.world_size > 1 else None)
        if group is not None:
            dist.all_reduce(tensor, op=op or dist.ReduceOp.SUM, group=group)

    def speaks_for_replicas(self, *, once_per_pipeline: bool = False) -> bool:
        """Say whether this rank is the first of those that see the same data in the same stage.

        Summing what only such ranks contribute counts every row of a batch once.
        """
        dims = {*self.layout.views["dense"].dims} - {*self.layout.data_dims}
        dims -= set() if once_per_pipeline else {"pp"}
        return not dims or self.coordinate(*sorted(dims)) == 0

    def barrier(self) -> None:
        """Wait for every rank of the run."""
        self.all_reduce(torch.zeros(1, device=self.device))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
