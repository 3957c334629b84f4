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
MAX_DIMS = 6


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
        self._within_rank: dict[MessageKey, torch.Tensor] = {}
        """Messages between two stages of this rank."""
        self._formats: dict[tuple[int, Shape], tuple[Shape, torch.dtype]] = {}
        """Shape and dtype of an edge's messages, as received for batches of a shape."""
        self._announced: set[tuple[int, Shape]] = set()
        """Edges and shapes of batches for which this rank has sent them."""
        self.waited = 0.0
        """Seconds that the host has waited for messages."""

    # --- sending ------------------------------------------------------------------------------

    def send(self, way: Way, edge: int, microbatch: int, tensor: torch.Tensor, tokens_shape: Shape) -> None:
        """Pass ``tensor`` along an edge. ``tokens_shape`` [B, S] is that of the batch, which both ends know.

        Its shape and dtype are sent ahead once for each shape of batches.
        """
        if self.owners[edge + 1 if way == "forward" else edge] == self.rank:
            self._within_rank[way, edge, microbatch] = tensor
            return
        if way == "forward" and (edge, tokens_shape) not in self._announced:
            self._announced.add((edge, tokens_shape))
            self.messages.arrived((way, edge, -1))  # a description of another shape
            self.messages.send((way, edge, -1), encode_metadata(tensor))
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
        self._within_rank.clear()
        self.messages.begin(microbatches)

    # --- receiving ----------------------------------------------------------------------------

    def receive(self, edge: int, microbatch: int, tokens_shape: Shape) -> torch.Tensor:
        """Receive the hidden states of a microbatch from the previous stage; ``tokens_shape``: its [B, S]."""
        key: MessageKey = ("forward", edge, microbatch)
        if key in self._within_rank:
            return self._within_rank.pop(key)
        if (edge, tokens_shape) not in self._formats:
            header = torch.empty(MAX_DIMS + 2, dtype=torch.int64, device=self.mesh.device)
            self._wait_for(("forward", edge, -1), header)
            self._formats[edge, tokens_shape] = decode_metadata(header)
        shape, dtype = self._formats[edge, tokens_shape]
        found = torch.empty(shape, dtype=dtype, device=self.mesh.device)
        self._wait_for(key, found)
        return found

    def receive_gradient(self, edge: int, microbatch: int, output: torch.Tensor) -> torch.Tensor:
        """Receive the gradient of ``output``, which this rank sent forward."""
        key: MessageKey = ("backward", edge, microbatch)
        if key in self._within_rank:
            return self._within_rank.pop(key)
        found = torch.empty_like(output, memory_format=torch.contiguous_format)
        self._wait_for(key, found)
        self.messages.arrived(("forward", edge, microbatch))
        return found

    def _wait_for(self, key: MessageKey, into: torch.Tensor) -> None:
        began = time.perf_counter()
        with self.mesh.waits.messages:
            self.messages.receive(key, into)
        self.waited += time.perf_counter() - began


def encode_metadata(tensor: torch.Tensor) -> torch.Tensor:
    """Encode dtype, number of dimensions and shape as a tensor of fixed size.

    Raises:
        PluginError: another dtype than :data:`DTYPES`, or too many dimensions.
    """
    if tensor.dtype not in DTYPES or tensor.dim() > MAX_DIMS:
        found = f"of {tensor.dtype} with {tensor.dim()} dimensions"
        names = ", ".join(map(str, DTYPES))
        raise PluginError(
            f"a stage's hidden states are {found}; expected at most {MAX_DIMS} dimensions and one of {names}"
        )
    header = [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    return torch.tensor(header + [0] * (MAX_DIMS + 2 - len(header)), device=tensor.device)


def decode_metadata(header: torch.Tensor) -> tuple[Shape, torch.dtype]:
    """Return the shape and dtype that :func:`encode_metadata` has encoded."""
    dtype, dims, *shape = header.tolist()
    return tuple(shape[:dims]), DTYPES[dtype]
