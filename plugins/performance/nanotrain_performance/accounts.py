"""What this rank's memory holds, counted by storages."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from nanotrain_core.api.torch import PlacedParameter, storage_of


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the memory behind ``tensors``; what several share counts once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def weight_bytes(placed: Iterable[PlacedParameter], parts: Iterable[nn.Module]) -> int:
    """Return the bytes of all parameters and buffers, in the form in which they are held.

    Args:
        placed: parameters of this rank. Those of ``parts`` may be DTensors, without memory of their own.
        parts: this rank's model parts, for their buffers.
    """
    held = [each.parameter for each in placed]
    return bytes_of(map(storage_of, [*held, *(buffer for part in parts for buffer in part.buffers())]))
