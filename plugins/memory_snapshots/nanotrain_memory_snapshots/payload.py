"""Converts a run's state to bytes and back: the blocks, then this rank's random-number streams."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import numpy as np
import torch

from nanotrain_core.api.torch import TrainState, storage_of

#: Alignment of every tensor in bytes.
ALIGNED = 64


@attrs.define(frozen=True)
class Form:
    """The tensors of a state, and their positions in its bytes."""

    tensors: Sequence[torch.Tensor]
    begins: Sequence[int]
    nbytes: int
    checksum: int
    """Checksum of names, shapes and dtypes."""

    @classmethod
    def of(cls, state: TrainState) -> Form:
        """Compute the layout of a state."""
        tensors = [storage_of(block.tensor) for block in state.blocks] + [*state.rank_tensors.values()]
        names = [(block.name, tuple(block.offset)) for block in state.blocks] + [*state.rank_tensors]
        begins, end = [], 0
        for tensor in tensors:
            begins.append(end)
            end += -(-tensor.numel() * tensor.element_size() // ALIGNED) * ALIGNED
        shapes = [(str(tensor.dtype), tuple(tensor.shape)) for tensor in tensors]
        return cls(tensors, begins, end, zlib.crc32(repr((names, shapes)).encode()))

    def places(self, payload: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each tensor that has elements, and its place in ``payload`` as a tensor of the same form."""
        for tensor, begin in zip(self.tensors, self.begins, strict=True):
            size = tensor.numel() * tensor.element_size()
            if size:
                yield tensor, payload[begin : begin + size].view(tensor.dtype).view(tensor.shape)

    def write(self, payload: torch.Tensor, after: Any) -> None:
        """Copy the tensors into ``payload``; those on a GPU as of ``after``, returned by :func:`computed`."""
        with _stream_of_its_own(after):
            for tensor, place in self.places(payload):
                if tensor.is_cpu and tensor.is_contiguous():  # NumPy is faster than torch on one thread
                    np.copyto(_bytes(place), _bytes(tensor))
                else:
                    place.copy_(tensor)

    def read(self, payload: torch.Tensor) -> None:
        """Copy ``payload`` into the tensors."""
        for tensor, place in self.places(payload):
            tensor.copy_(place)


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.view(-1).view(torch.uint8).numpy()


def computed(tensors: Sequence[torch.Tensor]) -> Any:
    """Return an event after which GPU ``tensors`` are computed, as queued by this thread; None: now."""
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    if device is None:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return device, event


@contextmanager
def _stream_of_its_own(after: Any) -> Iterator[None]:
    """In a thread, make a GPU copy on a separate stream after ``after``; at the end it is complete."""
    if after is None:
        yield
        return
    device, event = after
    torch.cuda.set_device(device)  # a thread starts on GPU 0, and would create a context there
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_event(event)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
