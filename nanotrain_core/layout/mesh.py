"""The process groups of one rank: a :class:`~nanotrain_core.layout.layout.Layout` made real.

Every group is named after its dimensions and has the run's timeout. A rank creates only the groups
it is a member of, so a mesh costs the same on 8 ranks and on 16,384.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nanotrain_core.layout import nccl
from nanotrain_core.layout.exchange import Exchange
from nanotrain_core.layout.layout import Layout, Span
from nanotrain_core.layout.timed import TimedExchange
from nanotrain_core.layout.transport import Transport
from nanotrain_core.watch.waits import Waits


class Mesh:
    """This rank's coordinates and groups. All methods that talk are no-ops along size 1."""

    def __init__(
        self,
        layout: Layout,
        *,
        rank: int = 0,
        device: torch.device | str = "cpu",
        timeout: timedelta = timedelta(minutes=5),
        transport: Transport | None = None,
    ) -> None:
        self.transport = transport or Transport()
        self.waits = Waits()
        """How long this rank is in exchanges with others. What talks past this class stands in
        ``with mesh.waits.collectives:``."""
        self.layout = layout
        self.rank = rank
        self.device = torch.device(device)
        self.timeout = timeout
        dense = layout.views["dense"].dims
        self._data = Span(tuple(dim for dim in dense if dim in layout.data_dims))
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._spans: list[Span] = []
        self._exchanges: dict[dist.ProcessGroup, Exchange] = {}
        self.create_groups([*(Span((dim,)) for dim in layout.dims), self._data])

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def carrier(self) -> torch.device:
        """Where a tensor must lie that one rank sends another: gloo takes none of a device."""
        return self.device if dist.get_backend() == "nccl" else torch.device("cpu")

    @property
    def device_is_async(self) -> bool:
        """Whether the host would have to wait to read a number of the device: anywhere but on a CPU.

        A training step then makes no host synchronisation: an overflow is skipped on the device, by
        ``found_inf``, and the host reads the flag one step later.
        """
        return self.device.type != "cpu"

    def size(self, *dims: str) -> int:
        return self.layout.size(*dims)

    def coordinate(self, *dims: str) -> int:
        """Return this rank's position along ``dims`` taken together."""
        return self.layout.coordinate(self.rank, *dims)

    def ranks(self, *dims: str) -> tuple[int, ...]:
        """Return the global ranks of this rank's group along ``dims``, ascending."""
        return self.layout.ranks(self.rank, *dims)

    def create_groups(self, wanted: Iterable[Span]) -> None:
        """Create this rank's groups of each of ``wanted``.

        All ranks of the run must ask for the same, in the same order; :meth:`agree_on_groups` sees to it
        where what is wanted comes from parameters, which differ between pipeline stages.
        """
        for span in wanted:
            member = self.layout.some_member(self.rank, span)
            ranks = self.layout.members(member, span)
            known = any(self.layout.members(member, other) == ranks for other in self._spans)
            if len(ranks) in (1, self.world_size) or known:
                continue
            self._spans.append(span)
            if self.rank in ranks:
                self._groups[ranks] = self.new_group(ranks, str(span))
            else:
                self.skip_group()

    def new_group(self, ranks: Sequence[int], name: str) -> dist.ProcessGroup:
        """Create one more group, for example for messages of its own. Collective over ``ranks`` alone.

        torch tells groups of the same ranks apart by the number of groups a process has made before, so
        the ranks that are in none meanwhile must call :meth:`skip_group`, or later groups never meet.
        """
        more = nccl.of_subgroup(self.device, self.timeout)
        return dist.new_group(  # type: ignore[no-any-return]
            list(ranks), timeout=self.timeout, use_local_synchronization=True, group_desc=name, **more
        )

    def skip_group(self) -> None:
        """Count a group that other ranks make without this one: it makes one of itself."""
        backend = None if self.device.type == "cpu" else "gloo"  # nothing to set up on a device
        dist.new_group([self.rank], backend=backend, use_local_synchronization=True, group_desc="alone")

    def agree_on_groups(self, wanted: Iterable[Span]) -> None:
        """Create the union of what all pipeline stages want, in one order. Collective over the world.

        Ranks of one stage hold the same parameters and want the same.
        """
        everyone = self.gather(set(wanted), "pp") if "pp" in self.layout.dims else [set(wanted)]
        self.create_groups(sorted(set().union(*everyone)))

    def group(self, *dims: str) -> dist.ProcessGroup | None:
        """Return the group along ``dims``, or None when it has one member.

        Raises:
            KeyError: several dimensions together were never asked for before training began.
        """
        return self.group_of(Span(dims))

    def group_of(self, span: Span) -> dist.ProcessGroup | None:
        """Return the group of ``span`` that this rank is in, or None when it has one member.

        Raises:
            KeyError: it is along several dimensions or stages and was never asked for.
        """
        ranks = self.layout.members(self.rank, span)
        if len(ranks) <= 1:
            return None
        if len(ranks) == self.world_size:
            return dist.group.WORLD
        if ranks not in self._groups:
            raise KeyError(f"no process group of {span}: ask for it with agree_on_groups first")
        return self._groups[ranks]

    def exchange(self, *dims: str) -> Exchange | None:
        """Return what :attr:`transport` offers the group along ``dims``, or None when it has one member.

        Raises:
            KeyError: several dimensions together were never asked for before training began.
        """
        return self.exchange_of(Span(dims))

    def exchange_of(self, span: Span) -> Exchange | None:
        """Return what :attr:`transport` offers the group of ``span``, or None when it has one member.

        Raises:
            KeyError: it is along several dimensions or stages and was never asked for.
        """
        group = self.group_of(span)
        if group is None:
            return None
        if group not in self._exchanges:
            seconds = self.timeout.total_seconds()
            found = self.transport.exchange(group, self.device, seconds)
            self._exchanges[group] = TimedExchange(found, self.waits)
        return self._exchanges[group]

    def gather(self, value: Any, *dims: str) -> list[Any]:
        """All-gather: return the ``value``, any picklable object, of every rank along ``dims`` or of all."""
        size = self.size(*dims) if dims else self.world_size
        if size == 1:
            return [value]
        everyone: list[Any] = [None] * size
        with self.waits.collectives:
            dist.all_gather_object(everyone, value, group=self.group(*dims) if dims else None)
        return everyone

    def all_reduce(self, tensor: torch.Tensor, *dims: str, op: dist.ReduceOp.RedOpType | None = None) -> None:
        """Reduce ``tensor`` in place over ``dims``, or over the world if none are named. SUM by default."""
        group = self.group(*dims) if dims else (dist.group.WORLD if self.world_size > 1 else None)
        if group is not None:
            with self.waits.collectives:
                dist.all_reduce(tensor, op=op or dist.ReduceOp.SUM, group=group)

    def all_reduce_sum_and_max(self, sums: torch.Tensor, most: torch.Tensor) -> None:
        """Reduce both tensors in place over the world, ``sums`` by SUM and ``most`` by MAX.

        Both are on their way at once, so that ranks wait for one another once and not twice.
        """
        if self.world_size == 1:
            return
        with self.waits.collectives:
            works = [
                dist.all_reduce(tensor, op=op, async_op=True)
                for tensor, op in ((sums, dist.ReduceOp.SUM), (most, dist.ReduceOp.MAX))
            ]
            for work in works:
                assert work is not None
                work.wait()

    def all_reduce_data(self, tensor: torch.Tensor) -> None:
        """Sum ``tensor`` in place over the ranks of this pipeline stage that see different data."""
        group = self.group_of(self._data)
        if group is not None:
            with self.waits.collectives:
                dist.all_reduce(tensor, group=group)

    def is_first_replica(self, *, once_per_pipeline: bool = False) -> bool:
        """Return whether this rank is the first of those that see the same data in the same stage.

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
