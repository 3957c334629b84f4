"""What this rank's memory holds, counted by storages."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from nanotrain_core.api.torch import storage_of


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the memory behind ``tensors``; what several share counts once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def weight_bytes(parts: Iterable[nn.Module]) -> int:
    """Return the bytes of all parameters and buffers, in the form in which they are held."""
    held = [each for part in parts for each in (*part.parameters(), *part.buffers())]
    return bytes_of(storage_of(each) for each in held)
