"""Send/recv between pipeline ranks: by default through torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from nanotrain_core.layout.mesh import Mesh

Way = Literal["forward", "backward"]
#: Directions of a message between stages: activations go forward, gradients backward.
DIRECTIONS: tuple[Way, ...] = ("forward", "backward")

#: Direction, edge and number of a message.
MessageKey = tuple[Way, int, int]


class Messages:
    """Send/recv along the edges between stages of which this rank is an end, on a CPU.

    Edge e is from stage e to e + 1. All edges share a group, and tags identify messages: they may overtake
    one another. Per direction and edge, each message of a step has the number of its microbatch;
    -1 is the number of a shape description, which precedes the first message.
    """

    def __init__(self, owners: Sequence[int], mesh: Mesh) -> None:
        """Create the groups. Collective over the run.

        Args:
            owners: the pipeline rank of each stage.
            mesh: of the run.
        """
        self.owners, self.mesh = owners, mesh
        self.crossing = [edge for edge in range(len(owners) - 1) if owners[edge] != owners[edge + 1]]
        """Edges between two different ranks."""
        self._sent: dict[MessageKey, tuple[dist.Work, torch.Tensor]] = {}
        self._groups: dict[tuple[Way, int], dist.ProcessGroup] = {}
        if self.crossing:
            self._make_groups()

    def _make_groups(self) -> None:
        group = self.mesh.new_group(self.mesh.ranks("pp"), "p2p")
        self._groups = {(way, edge): group for edge in self.crossing for way in DIRECTIONS}

    def begin(self, microbatches: int) -> None:
        """Begin a step with these numbers, and discard what an interrupted step left behind. Collective."""
        self._sent.clear()

    def send(self, key: MessageKey, tensor: torch.Tensor) -> None:
        """Begin to send ``tensor``, which must not be modified until it has arrived."""
        for other in [other for other, (work, _) in self._sent.items() if work.is_completed()]:
            del self._sent[other]  # what has arrived, as far as the backend reports it without a wait
        way, edge, _ = key
        receiver = self._global(self.owners[edge + 1 if way == "forward" else edge])
        tensor = tensor.contiguous()
        work = dist.isend(tensor, receiver, group=self._groups[way, edge], tag=self._tag(key))
        assert work is not None
        self._sent[key] = work, tensor

    def arrived(self, key: MessageKey) -> None:
        """Release a message that must have arrived: gloo reports it only when waited for."""
        if key in self._sent:
            self._sent.pop(key)[0].wait()

    def flush(self) -> None:
        """Return once all messages have been sent."""
        for work, _ in self._sent.values():
            work.wait()
        self._sent.clear()

    def receive(self, key: MessageKey, into: torch.Tensor) -> None:
        """Receive a message with the shape and dtype of ``into``, which is contiguous."""
        way, edge, _ = key
        sender = self._global(self.owners[edge if way == "forward" else edge + 1])
        work = dist.irecv(into, sender, group=self._groups[way, edge], tag=self._tag(key))
        assert work is not None
        work.wait()

    def _global(self, rank: int) -> int:
        """Return the global rank of a pipeline rank."""
        return self.mesh.ranks("pp")[rank]

    def _tag(self, key: MessageKey) -> int:
        way, edge, number = key
        return ((number + 1) * len(self.owners) + edge) * 2 + (way == "backward")


class EdgeMessages(Messages):
    """Send/recv with a group for each edge and direction: NCCL handles the messages of a group in order.

    A schedule runs the microbatches of an edge in the same order at both ends (the harness tests it).
    """

    def _make_groups(self) -> None:
        """Create a group for each edge between two ranks, in either direction.

        Even edges come first: ranks then wait for one neighbor and not for a chain of them.
        """
        rank = self.mesh.coordinate("pp")
        made = [0] * (max(self.owners) + 1)
        for edge in sorted(self.crossing, key=lambda edge: (edge % 2, edge)):
            ends = self.owners[edge : edge + 2]
            self._keep_in_step(made, ends, max(made[end] for end in ends))
            if rank in ends:
                for way in DIRECTIONS:
                    self._groups[way, edge] = self._connect(ends, way, f"p2p-{way}-{edge}")
            for end in ends:
                made[end] += len(DIRECTIONS)
        self._keep_in_step(made, range(len(made)), max(made))

    def _keep_in_step(self, made: list[int], ranks: Sequence[int], number: int) -> None:
        """Make pipeline ranks count as many groups as others have: see :meth:`Mesh.new_group`."""
        for rank in ranks:
            if rank == self.mesh.coordinate("pp"):
                for _ in range(number - made[rank]):
                    self.mesh.skip_group()
            made[rank] = number

    def _connect(self, ends: Sequence[int], way: Way, name: str) -> dist.ProcessGroup:
        """Create a group of two pipeline ranks and connect it, so that the first send need not wait.

        NCCL connects send/recv separately from collectives: an all-reduce would not suffice.
        """
        group = self.mesh.new_group(sorted(map(self._global, ends)), name)
        number = torch.zeros(1, device=self.mesh.device)
        sender, receiver = map(self._global, ends if way == "forward" else reversed(ends))
        if self.mesh.rank == sender:
            dist.send(number, receiver, group=group)
        else:
            dist.recv(number, sender, group=group)
        return group
