"""The process groups of one rank, created from a :class:`~nanotrain_core.layout.layout.Layout`.

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
    """This rank's coordinates and groups. All methods that communicate are no-ops along size 1."""

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
        """Accumulates the time this rank spends in communication. Communication that bypasses this class is
        wrapped in ``with mesh.waits.collectives:``."""
        self.layout = layout
        """The coordinates of all ranks."""
        self.rank = rank
        """Number of this rank among all, from 0."""
        self.device = torch.device(device)
        self.timeout = timeout
        """How long a collective may take before it fails."""
        dense = layout.views["dense"].dims
        self._data = Span(tuple(dim for dim in dense if dim in layout.data_dims))
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._spans: list[Span] = []
        self._exchanges: dict[dist.ProcessGroup, Exchange] = {}
        self.create_groups([*(Span((dim,)) for dim in layout.dims), self._data, Span(layout.row_dims)])

    @property
    def world_size(self) -> int:
        """Return the number of all ranks."""
        return self.layout.world_size

    @property
    def p2p_device(self) -> torch.device:
        """The device of a tensor that one rank sends another: gloo cannot send device tensors."""
        return self.device if dist.get_backend() == "nccl" else torch.device("cpu")

    @property
    def device_is_async(self) -> bool:
        """Whether reading a value from the device makes the host wait: true everywhere except on a CPU.

        A training step then makes no host synchronization: an overflow is skipped on the device, through
        ``found_inf``, and the host reads the flag one step later.
        """
        return self.device.type != "cpu"

    def size(self, *dims: str) -> int:
        """Return the number of ranks along ``dims`` combined, 1 for none.

        Raises:
            KeyError: no view of the layout has all of ``dims``. Not every topology has ``tp`` or ``cp``:
                :meth:`degree` accepts them nevertheless.
        """
        return self.layout.size(*dims)

    def degree(self, *dims: str) -> int:
        """Return the product of the sizes of ``dims``; a dimension that the topology lacks has size 1."""
        return self.layout.degree(*dims)

    def coordinate(self, *dims: str) -> int:
        """Return this rank's position along ``dims`` combined.

        Raises:
            KeyError: as in :meth:`size`.
        """
        return self.layout.coordinate(self.rank, *dims)

    def ranks(self, *dims: str) -> tuple[int, ...]:
        """Return the global ranks of this rank's group along ``dims``, ascending.

        Raises:
            KeyError: as in :meth:`size`.
        """
        return self.layout.ranks(self.rank, *dims)

    def create_groups(self, wanted: Iterable[Span]) -> None:
        """Create this rank's groups for each of ``wanted``.

        All ranks of the run must request the same groups, in the same order; :meth:`agree_on_groups` ensures
        it where the groups follow from parameters, which differ between pipeline stages.
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
        """Create one more group, for example for a separate kind of message. Collective over ``ranks`` only.

        torch distinguishes groups of the same ranks by the number of groups a process has created before, so
        ranks that are in none of them must call :meth:`skip_group`, or later groups never connect.
        """
        more = nccl.of_subgroup(self.device, self.timeout)
        return dist.new_group(  # type: ignore[no-any-return]
            list(ranks), timeout=self.timeout, use_local_synchronization=True, group_desc=name, **more
        )

    def skip_group(self) -> None:
        """Count a group that other ranks create without this one: it creates a group of itself."""
        backend = None if self.device.type == "cpu" else "gloo"  # no setup on the device
        dist.new_group([self.rank], backend=backend, use_local_synchronization=True, group_desc="alone")

    def agree_on_groups(self, wanted: Iterable[Span]) -> None:
        """Create the union of all pipeline stages' groups, in one order. Collective over the world.

        Ranks of one stage hold the same parameters and need the same groups.
        """
        everyone = self.gather(set(wanted), "pp") if "pp" in self.layout.dims else [set(wanted)]
        self.create_groups(sorted(set().union(*everyone)))

    def group(self, *dims: str) -> dist.ProcessGroup | None:
        """Return the group along ``dims``, or None when it has one member.

        Raises:
            KeyError: the group of several dimensions was not created before training began.
        """
        return self.group_of(Span(dims))

    def group_of(self, span: Span) -> dist.ProcessGroup | None:
        """Return this rank's group of ``span``, or None when it has one member.

        Raises:
            KeyError: the group of several dimensions or stages was not created.
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
        """Return the :attr:`transport`'s collectives for the group along ``dims``; None if it has one member.

        Raises:
            KeyError: the group of several dimensions was not created before training began.
        """
        return self.exchange_of(Span(dims))

    def exchange_of(self, span: Span) -> Exchange | None:
        """Return the :attr:`transport`'s collectives for the group of ``span``; None if it has one member.

        Raises:
            KeyError: the group of several dimensions or stages was not created.
        """
        group = self.group_of(span)
        return None if group is None else self._exchange(group)

    def _exchange(self, group: dist.ProcessGroup) -> Exchange:
        if group not in self._exchanges:
            seconds = self.timeout.total_seconds()
            found = self.transport.exchange(group, self.device, seconds)
            self._exchanges[group] = TimedExchange(found, self.waits)
        return self._exchanges[group]

    def gather(self, value: Any, *dims: str) -> list[Any]:
        """All-gather ``value``, any picklable object, from every rank along ``dims``, or from all ranks."""
        size = self.size(*dims) if dims else self.world_size
        if size == 1:
            return [value]
        everyone: list[Any] = [None] * size
        with self.waits.collectives:
            dist.all_gather_object(everyone, value, group=self.group(*dims) if dims else None)
        return everyone

    def all_reduce(self, tensor: torch.Tensor, *dims: str, op: dist.ReduceOp.RedOpType | None = None) -> None:
        """All-reduce ``tensor`` in place over ``dims``, or the world if none are named. SUM by default."""
        group = self.group(*dims) if dims else (dist.group.WORLD if self.world_size > 1 else None)
        if group is not None:
            with self.waits.collectives:
                dist.all_reduce(tensor, op=op or dist.ReduceOp.SUM, group=group)

    def all_reduce_sum_and_max(self, sums: torch.Tensor, most: torch.Tensor) -> None:
        """All-reduce both tensors in place over the world, ``sums`` by SUM and ``most`` by MAX.

        Ranks wait for one another only once.
        """
        if self.world_size > 1 and (world := dist.group.WORLD) is not None:
            self._exchange(world).all_reduce_sum_and_max(sums, most)

    def all_reduce_data(self, tensor: torch.Tensor) -> None:
        """All-reduce ``tensor`` in place over the ranks of this pipeline stage that see different data."""
        group = self.group_of(self._data)
        if group is not None:
            with self.waits.collectives:
                dist.all_reduce(tensor, group=group)

    def is_first_replica(self, *, once_per_pipeline: bool = False) -> bool:
        """Return whether this rank is the first of those that see the same data in the same stage.

        Summing only the contributions of such ranks counts every row of a batch once.
        """
        dims = {*self.layout.views["dense"].dims} - {*self.layout.data_dims}
        dims -= set() if once_per_pipeline else {"pp"}
        return not dims or self.coordinate(*sorted(dims)) == 0

    def barrier(self) -> None:
        """Wait for every rank of the run."""
        self.all_reduce(torch.zeros(1, device=self.device))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
