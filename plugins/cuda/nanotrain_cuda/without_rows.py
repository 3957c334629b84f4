"""Gradients of stacked experts, zero for those without rows, as an operator of a compiled graph.

A grouped product leaves undefined what it has no rows for. To set that to zero, plain PyTorch reads and
writes the gradients of all experts. One kernel here writes only those of experts without rows, of which there
are hardly ever any. On a CPU it is plain PyTorch.

Shapes: E experts, N outputs, K inputs.
"""

from __future__ import annotations

from functools import partial

import torch

from nanotrain_core.api.models import has_one_kernel
from nanotrain_core.api.torch import TORCH_OPS, grouped_linear_on_gpu
from nanotrain_cuda.permutation import in_triton

Tensor = torch.Tensor


def experts(rows_ND: Tensor, counts_E: Tensor, gate_EFD: Tensor, up_EFD: Tensor, down_EDF: Tensor) -> Tensor:
    """Return what plain PyTorch's does. See :class:`~nanotrain_core.api.torch.Ops`."""
    if not has_one_kernel(rows_ND, *gate_EFD.shape[1:]):
        return TORCH_OPS.experts(rows_ND, counts_E, gate_EFD, up_EFD, down_EDF)
    linear = partial(grouped_linear_on_gpu, counts_E=counts_E, zero=zeroed)
    return linear(TORCH_OPS.swiglu(linear(rows_ND, gate_EFD), linear(rows_ND, up_EFD)), down_EDF)


@torch.library.custom_op("nanotrain_cuda::zero_without_rows", mutates_args=("stacked",))
def zero_without_rows(stacked: Tensor, counts: Tensor) -> None:
    """Set matrices [E, N, K] to zero whose count of rows is 0, in place."""
    if in_triton(stacked) and is_dense(stacked):
        from nanotrain_cuda import triton_without_rows

        triton_without_rows.zero_without_rows(stacked, counts)
    else:
        stacked.masked_fill_((counts == 0)[:, None, None], 0.0)


@zero_without_rows.register_fake
def _(stacked: Tensor, counts: Tensor) -> None:
    return None


def is_dense(stacked: Tensor) -> bool:
    """Return whether each matrix, transposed or not, is one block of memory."""
    return stacked[0].is_contiguous() or stacked[0].T.is_contiguous()


def zeroed(stacked_ENK: Tensor, counts_E: Tensor) -> Tensor:
    """Return matrices after :func:`zero_without_rows`."""
    zero_without_rows(stacked_ENK, counts_E)
    return stacked_ENK
