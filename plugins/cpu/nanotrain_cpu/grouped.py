"""The matrix products of stacked experts, one by one or all in a batch.

oneDNN, which computes bfloat16 products, takes 2.5 ms to prepare each new shape, and 20 us of overhead for
each product, half of the time of a small one. So rows are padded with zeros to a multiple, which leaves few
shapes, and small products are computed in one batch.

Shapes: N rows sorted by expert, E experts on this rank; of one of their weights, A inputs, B outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanotrain_cpu.matmul import matmul, onednn_is_faster_from

#: Rows of an expert are padded to a multiple of this, or of about 1/16 of the mean rows per expert.
MULTIPLE = 16

#: Multiplications of one expert's product up to which the products of all experts are batched.
SMALL = 2**26

#: Largest ratio of padded to actual rows for which products are batched.
FILLING = 1.25


class OneByOne:
    """A piece for each expert, whose rows are filled up with zeros to a ``multiple``."""

    def __init__(self, counts: list[int], multiple: int) -> None:
        self.counts = counts
        self.padded = [_filled(count, multiple) for count in counts]

    def cut(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return the pieces of ``rows``."""
        own = torch.split(rows, self.counts)
        missing = [padded - count for padded, count in zip(self.padded, self.counts, strict=True)]
        return [F.pad(r, (0, 0, 0, m)) if m else r for r, m in zip(own, missing, strict=True)]

    def weights(self, weight_EBA: torch.Tensor) -> list[torch.Tensor]:
        """Return the weights, or gradients of them, of each piece: views."""
        return list(weight_EBA.unbind())

    def room(self, like_NA: torch.Tensor, width: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return memory for a result with ``width`` columns, and the view of it for each piece."""
        memory = like_NA.new_empty(sum(self.padded), width)
        return memory, list(torch.split(memory, self.padded))

    def whole(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the result without its filling."""
        if self.padded == self.counts:
            return memory
        pieces = torch.split(memory, self.padded)
        return torch.cat([piece[:count] for piece, count in zip(pieces, self.counts, strict=True)])

    def forward(
        self, x_NA: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return a piece of x times the transposed weight, in ``out`` if there is one."""
        return matmul(x_NA, weight.T, out)

    def dgrad(
        self, d_y_NB: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None, *, add: bool = False
    ) -> torch.Tensor:
        """Return a piece of the gradient of x, in ``out``, or added to it."""
        return matmul(d_y_NB, weight, out, add=add)

    def wgrad(self, d_y_NB: torch.Tensor, x_NA: torch.Tensor, out: torch.Tensor) -> None:
        """Write a piece of the gradient of the weights to ``out``: zero over no rows."""
        matmul(d_y_NB.T, x_NA, out)


class Batched:
    """One piece [E, R, ...]: the rows of all experts, padded with zeros to R rows each.

    See :class:`OneByOne` for the methods.
    """

    def __init__(self, counts: list[int], multiple: int) -> None:
        rows = _filled(max(counts), multiple)
        self.shape = len(counts), rows
        places = [torch.arange(e * rows, e * rows + count) for e, count in enumerate(counts)]
        self.place_N = torch.cat(places)
        self.source_ER = torch.full((len(counts) * rows,), -1)
        self.source_ER[self.place_N] = torch.arange(len(self.place_N))
        self.filling = (self.source_ER < 0).nonzero().flatten()
        self.source_ER.clamp_(min=0)

    def cut(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return all rows, and the filling."""
        filled = rows.index_select(0, self.source_ER).index_fill_(0, self.filling, 0.0)
        return [filled.view(*self.shape, -1)]

    def weights(self, weight_EBA: torch.Tensor) -> list[torch.Tensor]:
        """Return all."""
        return [weight_EBA]

    def room(self, like_NA: torch.Tensor, width: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return one tensor."""
        memory = like_NA.new_empty(*self.shape, width)
        return memory, [memory]

    def whole(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor without its filling."""
        return memory.flatten(0, 1).index_select(0, self.place_N)

    def forward(
        self, x_NA: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return all products."""
        return torch.bmm(x_NA, weight.transpose(1, 2), out=out)

    def dgrad(
        self, d_y_NB: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None, *, add: bool = False
    ) -> torch.Tensor:
        """Return all products."""
        if out is None or not add:
            return torch.bmm(d_y_NB, weight, out=out)
        return out.baddbmm_(d_y_NB, weight)

    def wgrad(self, d_y_NB: torch.Tensor, x_NA: torch.Tensor, out: torch.Tensor) -> None:
        """Make all products."""
        torch.bmm(d_y_NB.transpose(1, 2), x_NA, out=out)


Products = OneByOne | Batched


def choose_products(rows_NA: torch.Tensor, counts: list[int], weight_EBA: torch.Tensor) -> Products:
    """Return the fastest way to make products of these rows."""
    multiple = _multiple(rows_NA, weight_EBA)
    filled = len(counts) * _filled(max(counts), multiple)
    small = filled * weight_EBA[0].numel() <= len(counts) * SMALL
    if rows_NA.element_size() == 2 and small and 0 < filled <= FILLING * len(rows_NA):
        return Batched(counts, multiple)
    return OneByOne(counts, multiple)


def _filled(count: int, multiple: int) -> int:
    return count + -count % multiple


def _multiple(rows_NA: torch.Tensor, weight_EBA: torch.Tensor) -> int:
    """Return the multiple to which an expert's rows are padded; 1 if oneDNN does not compute the products."""
    if rows_NA.dtype == torch.float64:
        return 1
    mean = len(rows_NA) // len(weight_EBA)
    if rows_NA.dtype == torch.float32 and mean * weight_EBA[0].numel() < onednn_is_faster_from():
        return 1
    return max(MULTIPLE, 1 << max(0, mean.bit_length() - 5))
