"""Send/recv (p2p) between pipeline stages: within a rank, or as a message to another rank.

The transport carries the messages (:mod:`nanotrain_core.layout.messages`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from nanotrain_core.checkpoint.tensor_boxes import Shape
from nanotrain_core.errors import PluginError
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.messages import MessageKey, Way

#: Possible dtypes of a message: the index is sent ahead of the first message.
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

#: Maximum number of dimensions of a message.
MOST_DIMS = 6


class StageP2P:
    """The edges between stages of which this rank is an end. Edge e is from stage e to e + 1."""

    def __init__(self, owners: Sequence[int], mesh: Mesh) -> None:
        """Prepare for messages. Collective over the run.

        Args:
            owners: the pipeline rank of each stage.
            mesh: of the run.
        """
        self.owners, self.mesh = owners, mesh
        self.rank = mesh.coordinate("pp") if len(set(owners)) > 1 else owners[0]
        self.messages = mesh.transport.messages(owners, mesh)
        self._kept: dict[MessageKey, torch.Tensor] = {}
        self._known: dict[tuple[int, Shape], tuple[Shape, torch.dtype]] = {}
        self._told: set[tuple[int, Shape]] = set()
        self.waited = 0.0
        """Seconds that the host has waited for messages."""

    # --- sending ------------------------------------------------------------------------------

    def send(self, way: Way, edge: int, microbatch: int, tensor: torch.Tensor, like: Shape) -> None:
        """Pass ``tensor`` along an edge. ``like``: the shape of the batch's tokens, which both ends know."""
        if self.owners[edge + 1 if way == "forward" else edge] == self.rank:
            self._kept[way, edge, microbatch] = tensor
            return
        if way == "forward" and (edge, like) not in self._told:
            self._told.add((edge, like))
            self.messages.arrived((way, edge, -1))  # a description of another shape
            self.messages.send((way, edge, -1), describe(tensor))
        with self.mesh.waits.messages:
            self.messages.send((way, edge, microbatch), tensor)

    def flush(self) -> None:
        """Return once all messages have been sent."""
        began = time.perf_counter()
        with self.mesh.waits.messages:
            self.messages.flush()
        self.waited += time.perf_counter() - began

    def begin(self, microbatches: int) -> None:
        """Begin a step with these numbers, and discard what an interrupted step left behind. Collective."""
        self._kept.clear()
        self.messages.begin(microbatches)

    # --- receiving ----------------------------------------------------------------------------

    def receive(self, edge: int, microbatch: int, like: Shape) -> torch.Tensor:
        """Receive the hidden states from the previous stage."""
        key: MessageKey = ("forward", edge, microbatch)
        if key in self._kept:
            return self._kept.pop(key)
        if (edge, like) not in self._known:
            header = torch.empty(MOST_DIMS + 2, dtype=torch.int64, device=self.mesh.device)
            self._wait_for(("forward", edge, -1), header)
            self._known[edge, like] = read(header)
        shape, dtype = self._known[edge, like]
        found = torch.empty(shape, dtype=dtype, device=self.mesh.device)
        self._wait_for(key, found)
        return found

    def receive_gradient(self, edge: int, microbatch: int, output: torch.Tensor) -> torch.Tensor:
        """Receive the gradient of ``output``, which this rank sent forward."""
        key: MessageKey = ("backward", edge, microbatch)
        if key in self._kept:
            return self._kept.pop(key)
        found = torch.empty_like(output, memory_format=torch.contiguous_format)
        self._wait_for(key, found)
        self.messages.arrived(("forward", edge, microbatch))
        return found

    def _wait_for(self, key: MessageKey, into: torch.Tensor) -> None:
        began = time.perf_counter()
        with self.mesh.waits.messages:
            self.messages.receive(key, into)
        self.waited += time.perf_counter() - began


def describe(tensor: torch.Tensor) -> torch.Tensor:
    """Encode dtype, number of dimensions and shape as a tensor of fixed size.

    Raises:
        PluginError: another dtype than :data:`DTYPES`, or too many dimensions.
    """
    if tensor.dtype not in DTYPES or tensor.dim() > MOST_DIMS:
        found = f"of {tensor.dtype} with {tensor.dim()} dimensions"
        names = ", ".join(map(str, DTYPES))
        raise PluginError(
            f"a stage's hidden states are {found}; expected at most {MOST_DIMS} dimensions and one of {names}"
        )
    header = [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    return torch.tensor(header + [0] * (MOST_DIMS + 2 - len(header)), device=tensor.device)


def read(header: torch.Tensor) -> tuple[Shape, torch.dtype]:
    """Decode shape and dtype from a described tensor."""
    dtype, dims, *shape = header.tolist()
    return tuple(shape[:dims]), DTYPES[dtype]
