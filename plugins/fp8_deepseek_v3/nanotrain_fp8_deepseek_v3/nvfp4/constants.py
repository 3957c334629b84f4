"""Small vectors of numbers on a device, which are copied there once.

``torch.tensor`` of a list copies from the host in each call, in a graph too, and the host waits for the copy.
What is made on the device of ``torch.arange`` does not have the same bits in a graph: inductor computes with
indices in 64 bits, where the hash counts on products modulo 2^32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch


@cache
def _stored(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


@torch.library.custom_op("nanotrain_fp8::constant", mutates_args=())
def constant(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return numbers as int32 [N] on a device. Theirs to write to: a graph may reuse the memory."""
    return _stored(tuple(numbers), device).clone()


@constant.register_fake
def _empty(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.empty(len(numbers), dtype=torch.int32, device=device)
