"""The matrix products of stacked experts, in the fastest way that a device has.

On a GPU in bfloat16 one kernel makes the products of all experts (torch's grouped_mm). On a CPU each
expert's are made while its rows are in the cache. oneDNN, which makes the bfloat16 ones there, takes 2.5 ms
for what it has to prepare for every new shape, and 20 us for every product, half of the time of a small one:
rows are filled up with zeros to a multiple that leaves few shapes, and small products are made in one batch.

Shapes: N rows sorted by expert, E experts on this rank, D width, F width of one expert on this rank; of the
linear layer of any of their weights, A inputs, B outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from nanotrain_core.models.linear import matmul, onednn_is_faster_from

#: Rows of an expert on a CPU are filled up to a multiple of this, or of about a 16th of their mean number.
MULTIPLE = 16

#: Multiplications of an expert's product up to which all experts' are one batch.
SMALL = 2**26

#: The most that filling them all up alike may add to their rows.
FILLING = 1.25


class Products(Protocol):
    """The products of a linear layer [B, A] of every expert, for rows in one or more pieces."""

    def cut(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return the pieces of ``rows``."""
        ...

    def weights(self, weight_EBA: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the weights for each piece."""
        ...

    def room(self, like_NA: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        """Return memory for a result [N, A] and, to be replaced by it, where in it each piece goes."""
        ...

    def whole(self, memory: torch.Tensor, pieces: list[Any]) -> torch.Tensor:
        """Return the result, all of whose pieces are there."""
        ...

    def forward(
        self, x_NA: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return a piece of x times the transposed weight [N, B], in ``out`` if there is one."""
        ...

    def backward(
        self,
        d_y_NB: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor | None = None,
        *,
        add: bool = False,
    ) -> torch.Tensor:
        """Return a piece of the gradient of x [N, A], in ``out``, or added to it, if there is one."""
        ...

    def weight_room(
        self, weight_EBA: torch.Tensor, total_EBA: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, list[Any]]:
        """Return memory for a gradient, and each piece's place: ``total_EBA`` to be added to, or new.

        None: the products make it themselves.
        """
        ...

    def of_weight(
        self, d_y_NB: torch.Tensor, x_NA: torch.Tensor, out: torch.Tensor, *, add: bool = False
    ) -> torch.Tensor:
        """Return a piece of the gradient of the weights, in ``out``, or added to it.

        It is zero for an expert without rows.
        """
        ...


def choose_products(rows_ND: torch.Tensor, counts_E: torch.Tensor, weight_EFD: torch.Tensor) -> Products:
    """Return the fastest way to make products of these rows."""
    sizes = weight_EFD.shape[1:]
    aligned = all(size * weight_EFD.element_size() % 16 == 0 for size in sizes)
    if rows_ND.is_cuda and rows_ND.dtype == torch.bfloat16 and aligned and len(rows_ND):
        return Grouped(counts_E)
    counts, multiple = counts_E.tolist(), _multiple(rows_ND, weight_EFD)
    filled = len(counts) * _filled(max(counts), multiple)
    small = filled * sizes.numel() <= len(counts) * SMALL
    on_cpu = rows_ND.device.type == "cpu"  # where a batch's places are
    if on_cpu and rows_ND.element_size() == 2 and small and 0 < filled <= FILLING * len(rows_ND):
        return Batched(counts, multiple)
    return OneByOne(counts, multiple)


def _filled(count: int, multiple: int) -> int:
    return count + -count % multiple


def _multiple(rows_ND: torch.Tensor, weight_EFD: torch.Tensor) -> int:
    """Return what to fill an expert's rows up to: where oneDNN will make the products, more than 1."""
    if rows_ND.device.type != "cpu" or rows_ND.dtype == torch.float64:
        return 1
    mean = len(rows_ND) // len(weight_EFD)
    large = mean * weight_EFD[0].numel() >= onednn_is_faster_from()
    if rows_ND.dtype == torch.float32 and not large:
        return 1
    return max(MULTIPLE, 1 << max(0, mean.bit_length() - 5))


class OneByOne:
    """A piece for each expert, whose rows are filled up with zeros to a ``multiple``."""

    def __init__(self, counts: list[int], multiple: int) -> None:
        self.counts = counts
        self.padded = [_filled(count, multiple) for count in counts]

    def cut(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return the rows of each expert."""
        own = torch.split(rows, self.counts)
        missing = [padded - count for padded, count in zip(self.padded, self.counts, strict=True)]
        return [F.pad(r, (0, 0, 0, m)) if m else r for r, m in zip(own, missing, strict=True)]

    def weights(self, weight_EBA: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return each expert's."""
        return weight_EBA.unbind()

    def room(self, like_NA: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        """Return views of one tensor."""
        memory = like_NA.new_empty(sum(self.padded), like_NA.shape[1])
        return memory, list(torch.split(memory, self.padded))

    def whole(self, memory: torch.Tensor, pieces: list[Any]) -> torch.Tensor:
        """Return the tensor, without its filling."""
        if self.padded == self.counts:
            return memory
        return torch.cat([piece[:count] for piece, count in zip(pieces, self.counts, strict=True)])

    def forward(
        self, x_NA: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """One product."""
        return matmul(x_NA, weight.T, out)

    def backward(
        self,
        d_y_NB: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor | None = None,
        *,
        add: bool = False,
    ) -> torch.Tensor:
        """One product."""
        return matmul(d_y_NB, weight, out, add=add)

    def weight_room(
        self, weight_EBA: torch.Tensor, total_EBA: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, list[Any]]:
        """Return views of one tensor."""
        memory = torch.empty_like(weight_EBA) if total_EBA is None else total_EBA
        return memory, list(memory.unbind())

    def of_weight(
        self, d_y_NB: torch.Tensor, x_NA: torch.Tensor, out: torch.Tensor, *, add: bool = False
    ) -> torch.Tensor:
        """One product; over no rows it is zero."""
        return matmul(d_y_NB.T, x_NA, out, add=add)


class Batched:
    """One piece [E, R, ...]: the rows of all experts, filled up with zeros to R, as many for each."""

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

    def weights(self, weight_EBA: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return all."""
        return [weight_EBA]

    def room(self, like_NA: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        """Return one tensor."""
        memory = like_NA.new_empty(*self.shape, like_NA.shape[1])
        return memory, [memory]

    def whole(self, memory: torch.Tensor, pieces: list[Any]) -> torch.Tensor:
        """Return the tensor, without its filling."""
        return memory.flatten(0, 1).index_select(0, self.place_N)

    def forward(
        self, x_NA: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """All products."""
        return torch.bmm(x_NA, weight.transpose(1, 2), out=out)

    def backward(
        self,
        d_y_NB: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor | None = None,
        *,
        add: bool = False,
    ) -> torch.Tensor:
        """All products."""
        if out is None or not add:
            return torch.bmm(d_y_NB, weight, out=out)
        return out.baddbmm_(d_y_NB, weight)

    def weight_room(
        self, weight_EBA: torch.Tensor, total_EBA: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, list[Any]]:
        """Return one tensor."""
        memory = torch.empty_like(weight_EBA) if total_EBA is None else total_EBA
        return memory, [memory]

    def of_weight(
        self, d_y_NB: torch.Tensor, x_NA: torch.Tensor, out: torch.Tensor, *, add: bool = False
    ) -> torch.Tensor:
        """All products."""
        if add:
            return out.baddbmm_(d_y_NB.transpose(1, 2), x_NA)
        return torch.bmm(d_y_NB.transpose(1, 2), x_NA, out=out)


class Grouped:
    """One piece: a kernel for all experts, which reads on the device where their rows end."""

    def __init__(self, counts_E: torch.Tensor) -> None:
        self.ends = counts_E.cumsum(0).to(torch.int32)
        self.idle = (counts_E == 0)[:, None, None]

    def cut(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return all rows."""
        return [rows.contiguous()]

    def weights(self, weight_EBA: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return all."""
        return [weight_EBA]

    def room(self, like_NA: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        """Return nothing: the kernel makes room itself."""
        return like_NA.new_empty(0), [None]

    def whole(self, memory: torch.Tensor, pieces: list[Any]) -> torch.Tensor:
        """Return what the kernel made."""
        return pieces[0]  # type: ignore[no-any-return]

    def forward(
        self, x_NA: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """All products."""
        return F.grouped_mm(x_NA, weight.transpose(1, 2), offs=self.ends)

    def backward(
        self,
        d_y_NB: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor | None = None,
        *,
        add: bool = False,
    ) -> torch.Tensor:
        """All products."""
        d_x_NA = F.grouped_mm(d_y_NB, weight, offs=self.ends)
        return d_x_NA if out is None else out.add_(d_x_NA)

    def weight_room(
        self, weight_EBA: torch.Tensor, total_EBA: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, list[Any]]:
        """Return nothing: the kernel does not add."""
        return None, [None]

    def of_weight(
        self, d_y_NB: torch.Tensor, x_NA: torch.Tensor, out: torch.Tensor, *, add: bool = False
    ) -> torch.Tensor:
        """All products; what the kernel leaves for an expert without rows is not defined."""
        return F.grouped_mm(d_y_NB.T, x_NA, offs=self.ends).masked_fill_(self.idle, 0.0)
