"""Memory layouts of tensors, for checks of code that must read any strides."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

View = Callable[[torch.Tensor], torch.Tensor]


def as_it_is(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``."""
    return x


def sliced(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` as a slice of a wider tensor, whose other elements are 7."""
    wide = F.pad(x if x.dim() else x.unsqueeze(0), (1, 2), value=7.0)
    return wide[..., 1:-2] if x.dim() else wide[1]


def transposed(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with its last two dimensions transposed in memory."""
    return x.mT.contiguous().mT if x.dim() > 1 else x


def swapped(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with its first two dimensions swapped in memory, so that rows have no single stride."""
    return x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() > 1 else x


def repeated(x: torch.Tensor) -> torch.Tensor:
    """Return the first of ``x`` in place of each, in memory of its own."""
    return expanded(x).contiguous()


def expanded(x: torch.Tensor) -> torch.Tensor:
    """Return the first of ``x`` in place of each, in the same memory, as the gradient of a sum is."""
    return x[:1].expand_as(x) if x.dim() else x


#: Layouts of tensors with the values of a contiguous one, and the dimensions from which each is another.
LAYOUTS: dict[str, tuple[View, int]] = {
    "a slice of a wider tensor": (sliced, 0),
    "transposed in memory": (transposed, 2),
    "swapped in its first two dimensions": (swapped, 3),
}
