"""Plain products of rows and weights, which are unpacked for each product and forgotten after it.

For a precision that changes how weights are held and nothing else. A weight is unpacked twice in a
microbatch, for y and for the gradient of x: only one is ever there as numbers, or that of all experts of a
layer.

Shapes: M rows, K inputs, N outputs; of stacked weights E.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TypeVar

import torch

from nanotrain_core.models.linear import matmul
from nanotrain_core.moe.grouped_mm import Products, choose_products
from nanotrain_core.precision.gemm import Kept
from nanotrain_core.precision.quantized_storage import dequantize

P = TypeVar("P", bound="DequantizingGEMM")


class DequantizingGEMM:
    """Multiplies in the dtype of what comes in. See :class:`~nanotrain_core.precision.gemm.GEMMBackend`."""

    counts_E: torch.Tensor | None = None
    """Rows of each of several stacked weights; None for one weight."""

    def grouped(self: P, counts_E: torch.Tensor) -> P:
        """Return the same for stacked weights."""
        new = copy.copy(self)
        new.counts_E = counts_E
        return new

    def read_weight(self, weight_NK: torch.Tensor) -> torch.Tensor:
        """Return what is multiplied for a weight [N, K] or [E, N, K]: its numbers."""
        return dequantize(weight_NK)

    def forward(self, x_MK: torch.Tensor, *weights_NK: torch.Tensor) -> tuple[list[torch.Tensor], Kept]:
        """Return x times each transposed weight, and x."""
        return [self._forward(x_MK, self.read_weight(weight)) for weight in weights_NK], (x_MK,)

    def _forward(self, x_MK: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self.counts_E is None:
            return matmul(x_MK, weight.mT)
        way = choose_products(x_MK, self.counts_E, weight)
        return all_pieces(way, way.forward, x_MK, weight, weight.shape[1])

    def keep(self, x_MK: torch.Tensor) -> Kept:
        """Return x."""
        return (x_MK,)

    def input_gradient(self, d_y_MN: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        """Return dy times the weight."""
        weight = self.read_weight(weight_NK)
        if self.counts_E is None:
            return matmul(d_y_MN, weight)
        way = choose_products(d_y_MN, self.counts_E, weight)
        return all_pieces(way, way.backward, d_y_MN, weight, weight.shape[2])

    def weight_gradient(self, d_y_MN: torch.Tensor, kept: Kept) -> torch.Tensor:
        """Return the transposed dy times x."""
        (x_MK,) = kept
        if self.counts_E is None:
            return matmul(d_y_MN.T, x_MK)
        total = d_y_MN.new_empty(len(self.counts_E), d_y_MN.shape[1], x_MK.shape[1])
        way = choose_products(d_y_MN, self.counts_E, total)
        memory, places = way.weight_room(total, total)
        made = [way.of_weight(*each) for each in zip(way.cut(d_y_MN), way.cut(x_MK), places, strict=True)]
        return made[0] if memory is None else memory


def all_pieces(
    way: Products, multiply: Callable[..., torch.Tensor], rows: torch.Tensor, weight: torch.Tensor, width: int
) -> torch.Tensor:
    """Return products [M, width], made piece by piece."""
    memory, places = way.room(rows.new_empty(0, width))
    pieces = zip(way.cut(rows), way.weights(weight), places, strict=True)
    return way.whole(memory, [multiply(*each) for each in pieces])
