"""The kernels of :mod:`~nanotrain_cuda.permutation`. Imported only where Triton is.

One program holds a whole row of a token in registers: wide loads and stores of rows that lie anywhere.

Shapes: T tokens, C experts chosen for each, N = T C rows, D width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Numbers that a thread holds of one row: two or four loads of 16 bytes.
EACH = 16


@triton.jit  # type: ignore[untyped-decorator]
def spread_rows(  # type: ignore[no-untyped-def]
    x_ptr,
    weights_ptr,
    outputs_ptr,
    back_ptr,
    rows_ptr,
    d_weights_ptr,
    D,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    SUM: tl.constexpr,
):
    """Write a token's row to its places; with weights, times each, and write the gradients of the weights."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + t * D + d, mask=d < D, other=0.0)
    for c in tl.static_range(CHOSEN):
        row = tl.load(back_ptr + t * CHOSEN + c) * D
        if weights_ptr is None:
            tl.store(rows_ptr + row + d, x, mask=d < D)
        else:
            wide = x.to(SUM)
            weight = tl.load(weights_ptr + t * CHOSEN + c).to(SUM)
            output = tl.load(outputs_ptr + row + d, mask=d < D, other=0.0).to(SUM)
            tl.store(rows_ptr + row + d, (wide * weight).to(rows_ptr.dtype.element_ty), mask=d < D)
            d_weight = tl.sum(output * wide, 0)
            tl.store(d_weights_ptr + t * CHOSEN + c, d_weight.to(d_weights_ptr.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator]
def add_up_rows(  # type: ignore[no-untyped-def]
    rows_ptr,
    weights_ptr,
    back_ptr,
    y_ptr,
    D,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    SUM: tl.constexpr,
):
    """Sum a token's rows; with weights, each row times its weight."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), SUM)
    for c in tl.static_range(CHOSEN):
        row = tl.load(back_ptr + t * CHOSEN + c) * D
        each = tl.load(rows_ptr + row + d, mask=d < D, other=0.0).to(SUM)
        if weights_ptr is None:
            total += each
        else:
            total += each * tl.load(weights_ptr + t * CHOSEN + c).to(SUM)
    tl.store(y_ptr + t * D + d, total.to(y_ptr.dtype.element_ty), mask=d < D)


def spread(x_TD: torch.Tensor, back_N: torch.Tensor, chosen: int) -> torch.Tensor:
    """Return rows [N, D], of each token as many as it has experts."""
    rows = x_TD.new_empty(len(back_N), x_TD.shape[1])
    if rows.numel():
        spread_rows[(len(x_TD),)](
            x_TD.contiguous(), None, None, back_N, rows, None, x_TD.shape[1], **_options(x_TD, chosen)
        )
    return rows


def add_up(
    rows_ND: torch.Tensor, back_N: torch.Tensor, chosen: int, weights_TC: torch.Tensor | None
) -> torch.Tensor:
    """Return the sum of each token's rows [T, D]; with weights, each row times its weight."""
    y = rows_ND.new_empty(len(back_N) // chosen, rows_ND.shape[1])
    if y.numel():
        weights = None if weights_TC is None else weights_TC.contiguous()
        add_up_rows[(len(y),)](
            rows_ND.contiguous(), weights, back_N, y, rows_ND.shape[1], **_options(rows_ND, chosen)
        )
    return y


def weigh_backward(
    d_y_TD: torch.Tensor, outputs_ND: torch.Tensor, back_N: torch.Tensor, weights_TC: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the rows [N, D] and of the weights [T, C] of :func:`add_up`."""
    d_rows, d_weights = outputs_ND.new_empty(outputs_ND.shape), weights_TC.new_zeros(weights_TC.shape)
    if d_rows.numel():
        spread_rows[(len(d_y_TD),)](
            d_y_TD.contiguous(), weights_TC.contiguous(), outputs_ND.contiguous(), back_N, d_rows, d_weights,
            d_y_TD.shape[1], **_options(d_y_TD, weights_TC.shape[1]),
        )  # fmt: skip
    return d_rows, d_weights


def _options(x: torch.Tensor, chosen: int) -> dict[str, object]:
    """Return what a kernel is compiled for."""
    block = triton.next_power_of_2(x.shape[1])
    wide = tl.float64 if x.dtype == torch.float64 else tl.float32
    warps = min(16, max(1, block // (32 * EACH)))
    return {"CHOSEN": chosen, "BLOCK": block, "SUM": wide, "num_warps": warps}
