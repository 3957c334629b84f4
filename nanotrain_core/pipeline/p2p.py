"""Hands tensors from one pipeline stage to the next: within a rank, or as a message to another one.

A schedule runs the microbatches of an edge in the same order at both ends (the harness checks it). NCCL takes
the messages of a group in order, so there each edge between stages has a group for either direction. On the
CPU all edges share a group and messages have tags; between ranks of one host they go through shared memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist

from nanotrain_core.host.messages import Channel, open_channels
from nanotrain_core.layout.mesh import Mesh

Way = Literal["forward", "backward"]
WAYS: tuple[Way, ...] = ("forward", "backward")

#: What a message can be made of: its number travels ahead of the first one.
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

#: Most dimensions of a message.
MOST_DIMS = 6

Shape = tuple[int, ...]


class StageP2P:
    """The edges between stages that this rank is at either end of. Edge e is from stage e to e + 1."""

    def __init__(self, owners: Sequence[int], mesh: Mesh, *, tags: bool | None = None) -> None:
        """Make the groups. Collective over the run.

        Args:
            owners: the pipeline rank of each stage.
            mesh: of the run.
            tags: whether messages of one group may overtake one another; by default only on CPU.
        """
        self.owners, self.mesh = owners, mesh
        self.rank = mesh.coordinate("pp") if len(set(owners)) > 1 else owners[0]
        self._kept: dict[tuple[Way, int, int], torch.Tensor] = {}
        self._sent: dict[tuple[Way, int, int], tuple[dist.Work, torch.Tensor]] = {}
        self._known: dict[tuple[int, Shape], tuple[Shape, torch.dtype]] = {}
        self._told: set[tuple[int, Shape]] = set()
        self._groups: dict[tuple[Way, int], dist.ProcessGroup] = {}
        self._channels: dict[tuple[str, int], Channel] = {}
        crossing = [e for e in range(len(owners) - 1) if owners[e] != owners[e + 1]]
        if crossing and (mesh.device.type == "cpu" if tags is None else tags):
            self._share_group(crossing)
        elif crossing:
            self._make_groups(crossing)
        self.waited = 0.0
        """Seconds that the host has waited for messages."""

    def _share_group(self, crossing: Sequence[int]) -> None:
        """Make one group for all edges: tags tell messages apart."""
        group = self.mesh.new_group(self.mesh.ranks("pp"), "p2p")
        self._groups = {(way, edge): group for edge in crossing for way in WAYS}
        pairs = {edge: self.owners[edge : edge + 2] for edge in crossing}
        ends = {("forward", edge): pair for edge, pair in pairs.items()}
        ends |= {("backward", edge): pair[::-1] for edge, pair in pairs.items()}
        self._channels = open_channels(ends, group, self.mesh.timeout.total_seconds())

    def _make_groups(self, crossing: Sequence[int]) -> None:
        """Make a group for each edge between two ranks, in either direction.

        Every second edge first: ranks then wait for one neighbour and not for a chain of them.
        """
        made = [0] * (max(self.owners) + 1)
        for edge in sorted(crossing, key=lambda edge: (edge % 2, edge)):
            ends = self.owners[edge : edge + 2]
            self._keep_in_step(made, ends, max(made[end] for end in ends))
            if self.rank in ends:
                for way in WAYS:
                    self._groups[way, edge] = self._meet(ends, f"p2p-{way}-{edge}")
            for end in ends:
                made[end] += len(WAYS)
        self._keep_in_step(made, range(len(made)), max(made))

    def _keep_in_step(self, made: list[int], ranks: Sequence[int], number: int) -> None:
        """Let pipeline ranks count as many groups as others have: see :meth:`Mesh.new_group`."""
        for rank in ranks:
            if rank == self.rank:
                for _ in range(number - made[rank]):
                    self.mesh.skip_group()
            made[rank] = number

    def _meet(self, ends: Sequence[int], name: str) -> dist.ProcessGroup:
        """Make a group of two pipeline ranks that is connected: no first send waits until it is."""
        ranks = self.mesh.ranks("pp")
        group = self.mesh.new_group(sorted(ranks[end] for end in ends), name)
        dist.all_reduce(torch.zeros(1, device=self.mesh.device), group=group)
        return group

    # --- sending ------------------------------------------------------------------------------

    def send(self, way: Way, edge: int, microbatch: int, tensor: torch.Tensor, like: Shape) -> None:
        """Pass ``tensor`` along an edge. ``like``: the shape of the batch's tokens, which both ends know."""
        receiver = self.owners[edge + 1 if way == "forward" else edge]
        if receiver == self.rank:
            self._kept[way, edge, microbatch] = tensor
            return
        if way == "forward" and (edge, like) not in self._told:
            self._told.add((edge, like))
            self._arrived((way, edge, -1))  # a description of another shape
            self._post((way, edge, -1), receiver, describe(tensor))
        if channel := self._channel(way, edge, tensor):
            channel.send(tensor, microbatch)
        else:
            self._post((way, edge, microbatch), receiver, tensor.contiguous())

    def _channel(self, way: Way, edge: int, tensor: torch.Tensor) -> Channel | None:
        """Return the shared memory that such a tensor goes through, if any."""
        channel = self._channels.get((way, edge))
        return channel if channel and channel.holds(tensor) else None

    def _post(self, key: tuple[Way, int, int], receiver: int, tensor: torch.Tensor) -> None:
        """Start to send, and let go of what has arrived, as far as the backend tells before it is asked."""
        for other in [other for other, (work, _) in self._sent.items() if work.is_completed()]:
            del self._sent[other]
        way, edge, _ = key
        to = self.mesh.ranks("pp")[receiver]
        work = dist.isend(tensor, to, group=self._groups[way, edge], tag=self._tag(*key))
        assert work is not None
        self._sent[key] = work, tensor

    def _arrived(self, key: tuple[Way, int, int]) -> None:
        """Let go of a message that must have arrived: gloo only tells when it is waited for."""
        if key in self._sent:
            self._sent.pop(key)[0].wait()

    def flush(self) -> None:
        """Return once everything sent has left."""
        began = time.perf_counter()
        for work, _ in self._sent.values():
            work.wait()
        self._sent.clear()
        self.waited += time.perf_counter() - began

    def begin(self, microbatches: int) -> None:
        """Begin a step of so many, and drop what one that was broken off left behind. Collective."""
        self._kept.clear()
        self._sent.clear()
        for channel in self._channels.values():
            channel.begin(microbatches)

    # --- receiving ----------------------------------------------------------------------------

    def receive(self, edge: int, microbatch: int, like: Shape) -> torch.Tensor:
        """Return the hidden states that the stage before passed forward."""
        key: tuple[Way, int, int] = ("forward", edge, microbatch)
        if key in self._kept:
            return self._kept.pop(key)
        if (edge, like) not in self._known:
            header = torch.empty(MOST_DIMS + 2, dtype=torch.int64, device=self.mesh.device)
            self._wait_for(("forward", edge, -1), self.owners[edge], header)
            self._known[edge, like] = read(header)
        shape, dtype = self._known[edge, like]
        found = torch.empty(shape, dtype=dtype, device=self.mesh.device)
        self._wait_for(key, self.owners[edge], found)
        return found

    def receive_gradient(self, edge: int, microbatch: int, output: torch.Tensor) -> torch.Tensor:
        """Return the gradient of ``output``, which this rank passed forward."""
        key: tuple[Way, int, int] = ("backward", edge, microbatch)
        if key in self._kept:
            return self._kept.pop(key)
        found = torch.empty_like(output, memory_format=torch.contiguous_format)
        self._wait_for(key, self.owners[edge + 1], found)
        self._arrived(("forward", edge, microbatch))
        return found

    def _wait_for(self, key: tuple[Way, int, int], sender: int, into: torch.Tensor) -> None:
        way, edge, microbatch = key
        began = time.perf_counter()
        if microbatch >= 0 and (channel := self._channel(way, edge, into)):
            channel.receive(into, microbatch)
        else:
            source = self.mesh.ranks("pp")[sender]
            work = dist.irecv(into, source, group=self._groups[way, edge], tag=self._tag(*key))
            assert work is not None
            work.wait()
        self.waited += time.perf_counter() - began

    def _tag(self, way: Way, edge: int, microbatch: int) -> int:
        """Number a message: -1 is the description that goes ahead of the first microbatch."""
        return ((microbatch + 1) * len(self.owners) + edge) * 2 + (way == "backward")


def describe(tensor: torch.Tensor) -> torch.Tensor:
    """Return dtype, number of dimensions and shape as a tensor of a fixed size."""
    header = [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    return torch.tensor(header + [0] * (MOST_DIMS + 2 - len(header)), device=tensor.device)


def read(header: torch.Tensor) -> tuple[Shape, torch.dtype]:
    """Return shape and dtype of a described tensor."""
    dtype, dims, *shape = header.tolist()
    return tuple(shape[:dims]), DTYPES[dtype]
