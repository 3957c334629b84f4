"""Products of sorted rows with stacked matrices, as torch operators: each is one node in a graph.

The number of rows of each matrix is a value on the device. A graph that reads it breaks there, or continues
with one unknown size for each expert, which takes minutes to compile. An operator reads it when it runs, and
its output has as many rows as its input. ``F.grouped_mm`` does not need it on the host, but supports neither
float64 nor, on a GPU, anything except bfloat16.

Shapes: M rows, sorted, of E matrices; K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


def rows_times(rows_MK: Tensor, right_EKN: Tensor, counts: list[int]) -> Tensor:
    """Multiply rows [M, K], sorted by expert, by their expert's matrix [E, K, N]; return [M, N].

    ``counts[e]`` rows belong to expert e, possibly 0.
    """
    pieces = zip(torch.split(rows_MK, counts), right_EKN, strict=True)
    return torch.cat([rows @ right_KN for rows, right_KN in pieces])


def transposed_times(left_MN: Tensor, right_MK: Tensor, counts: list[int]) -> Tensor:
    """Return left_e^T right_e for every expert e [E, N, K], zero for an expert without rows.

    ``left_e`` are the rows of ``left`` that belong to expert e: ``counts[e]`` of them, sorted by expert.
    """
    pieces = zip(torch.split(left_MN, counts), torch.split(right_MK, counts), strict=True)
    return torch.stack([left.T @ right for left, right in pieces])


def multiply(rows_MK: Tensor, right_EKN: Tensor, counts_E: Tensor) -> Tensor:
    """Return :func:`rows_times`, with counts in a tensor: the host waits for them."""
    return rows_times(rows_MK, right_EKN, counts_E.tolist())


def multiply_transposed(left_MN: Tensor, right_MK: Tensor, counts_E: Tensor) -> Tensor:
    """Return :func:`transposed_times`, with counts in a tensor: the host waits for them."""
    return transposed_times(left_MN, right_MK, counts_E.tolist())


def has_one_kernel(rows: Tensor, *sizes: int) -> bool:
    """Return whether ``F.grouped_mm`` supports ``rows``: on a GPU, in bfloat16, in multiples of 16 bytes.

    Args:
        rows: the left operand.
        sizes: the other dimensions, each of which must be a multiple of 16 bytes, like that of a row.
    """
    whole = all(size * rows.element_size() % 16 == 0 for size in (rows.shape[-1], *sizes))
    return rows.is_cuda and rows.dtype == torch.bfloat16 and bool(len(rows)) and whole


def in_one_kernel(rows_MK: Tensor, right_EKN: Tensor, counts_E: Tensor) -> Tensor:
    """Return :func:`multiply`, in one kernel, for which the host does not wait for the counts."""
    return F.grouped_mm(rows_MK.contiguous(), right_EKN, offs=counts_E.cumsum(0).to(torch.int32))


def transposed_in_one_kernel(left_MN: Tensor, right_MK: Tensor, counts_E: Tensor) -> Tensor:
    """Return :func:`multiply_transposed` in one kernel; 0 for a matrix without rows."""
    ends = counts_E.cumsum(0).to(torch.int32)
    found_ENK = F.grouped_mm(left_MN.contiguous().T, right_MK.contiguous(), offs=ends)
    return zero_without_rows(found_ENK, counts_E)


def zero_without_rows(found_ENK: Tensor, counts_E: Tensor) -> Tensor:
    """Return ``found`` with 0 for matrices without rows, for which ``F.grouped_mm`` is undefined."""
    return found_ENK.masked_fill((counts_E == 0)[:, None, None], 0.0)


#: Like :func:`zero_without_rows`, perhaps in place.
Zero = Callable[[Tensor, Tensor], Tensor]


class WithoutRows(torch.autograd.Function):
    """Identity of stacked weights; backward: the gradient of weights without rows is 0."""

    @staticmethod
    def forward(ctx: Any, weight_ENK: Tensor, counts_E: Tensor, zero: Zero) -> Tensor:
        ctx.save_for_backward(counts_E)
        ctx.zero = zero
        return weight_ENK.view_as(weight_ENK)

    @staticmethod
    def backward(ctx: Any, d_weight_ENK: Tensor) -> tuple[Tensor, None, None]:
        (counts_E,) = ctx.saved_tensors
        return ctx.zero(d_weight_ENK, counts_E), None, None


def grouped_linear_on_gpu(
    rows_NK: Tensor, weight_ENK: Tensor, counts_E: Tensor, zero: Zero = zero_without_rows
) -> Tensor:
    """Return each expert's rows times its transposed weight, in one kernel each way, without a host wait.

    ``zero`` sets the gradients of experts without rows to zero, which the kernel leaves undefined.
    """
    used: Tensor = WithoutRows.apply(weight_ENK, counts_E, zero)  # type: ignore[no-untyped-call]
    return in_one_kernel(rows_NK, used.transpose(1, 2), counts_E)


#: :func:`multiply`, differentiable.
grouped_mm = torch.library.custom_op(
    "nanotrain::grouped_mm",
    multiply,
    mutates_args=(),
    schema="(Tensor rows, Tensor right, Tensor counts) -> Tensor",
)

#: :func:`multiply_transposed`, which has no gradient.
grouped_mm_transposed = torch.library.custom_op(
    "nanotrain::grouped_mm_transposed",
    multiply_transposed,
    mutates_args=(),
    schema="(Tensor left, Tensor right, Tensor counts) -> Tensor",
)


@grouped_mm.register_fake
def _(rows: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], right.shape[2])


@grouped_mm_transposed.register_fake
def _(left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    return left.new_empty(counts.shape[0], left.shape[1], right.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, d_y_MN: Tensor) -> tuple[Tensor | None, ...]:
    rows_MK, right_EKN, counts_E = ctx.saved_tensors
    d_rows = grouped_mm(d_y_MN, right_EKN.mT, counts_E) if ctx.needs_input_grad[0] else None
    d_right = grouped_mm_transposed(d_y_MN, rows_MK, counts_E).mT if ctx.needs_input_grad[1] else None
    return d_rows, d_right, None


grouped_mm.register_autograd(_backward, setup_context=_keep)
