"""The kernel of :mod:`~nanotrain_cuda.adamw`. Imported only where Triton is.

Groups of consecutive elements share a scale. Where moments are encoded, divisions and roots are rounded as
plain PyTorch's are: the code is the same, except where the moment itself differs in its last bits.

Shapes: R groups of a program, of G elements each.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

#: Elements of a program, and of a group where moments have no codes.
BLOCK, GROUP = 1024, 32


@triton.jit
def to_nearest(x):  # type: ignore[no-untyped-def]
    """Round float32 numbers below 2^22 to whole ones, ties to even."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def rounded_up(largest):  # type: ignore[no-untyped-def]
    """Return positive float32 numbers rounded up to bfloat16 numbers."""
    return ((largest.to(tl.int32, bitcast=True) + 0xFFFF) >> 16 << 16).to(tl.float32, bitcast=True)


@triton.jit
def ratio_and_scale(moment):  # type: ignore[no-untyped-def]
    """Return moments [R, G] over their group's scale, and scales [R]."""
    scale = rounded_up(tl.max(tl.abs(moment), 1))
    return tl.div_rn(moment, tl.where(scale == 0, 1.0, scale)[:, None]), scale


@triton.jit  # type: ignore[untyped-decorator]
def adamw(  # type: ignore[no-untyped-def]
    weight_ptr,
    gradient_ptr,
    first_ptr,
    first_scale_ptr,
    second_ptr,
    second_scale_ptr,
    corrections_ptr,
    found_inf_ptr,
    size,
    beta1,
    rest1,
    beta2,
    rest2,
    decay,
    eps,
    R: tl.constexpr,
    G: tl.constexpr,
):
    """Update R groups of a weight and its moments. A pointer to scales is None if a moment has no codes."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    at = row[:, None] * G + tl.arange(0, G)[None, :]
    if found_inf_ptr is not None:
        size = tl.where(tl.load(found_inf_ptr) == 1.0, 0, size)
    there, grouped = at < size, row * G < size
    weight = tl.load(weight_ptr + at, mask=there, other=0.0)
    gradient = tl.load(gradient_ptr + at, mask=there, other=0.0)
    first = tl.load(first_ptr + at, mask=there, other=0).to(tl.float32)
    second = tl.load(second_ptr + at, mask=there, other=0).to(tl.float32)
    if first_scale_ptr is not None:
        scale = tl.load(first_scale_ptr + row, mask=grouped, other=0.0).to(tl.float32)
        first = tl.div_rn(first, 254.0 - tl.abs(first)) * scale[:, None]
    if second_scale_ptr is not None:
        scale = tl.load(second_scale_ptr + row, mask=grouped, other=0.0).to(tl.float32)
        root = second * (1.0 / 255.0)
        second = root * root * scale[:, None]

    first = beta1 * first + rest1 * gradient
    second = beta2 * second + rest2 * gradient * gradient
    step_size, factor = tl.load(corrections_ptr), tl.load(corrections_ptr + 1)
    weight -= decay * weight
    weight -= tl.div_rn(step_size * first, tl.sqrt_rn(second) * factor + eps)
    tl.store(weight_ptr + at, weight, mask=there)

    if first_scale_ptr is not None:
        ratio, scale = ratio_and_scale(first)
        first = to_nearest(tl.div_rn(ratio * 254.0, 1.0 + tl.abs(ratio)))
        tl.store(first_scale_ptr + row, scale.to(tl.bfloat16), mask=grouped)
    tl.store(first_ptr + at, first.to(first_ptr.dtype.element_ty), mask=there)
    if second_scale_ptr is not None:
        ratio, scale = ratio_and_scale(second)
        second = tl.maximum(to_nearest(tl.sqrt_rn(ratio) * 255.0), (ratio > 0).to(tl.float32))
        tl.store(second_scale_ptr + row, scale.to(tl.bfloat16), mask=grouped)
    tl.store(second_ptr + at, second.to(second_ptr.dtype.element_ty), mask=there)


def update_weight(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    state: Mapping[str, torch.Tensor],
    corrections: torch.Tensor,
    found_inf: torch.Tensor | None,
    beta1: float,
    beta2: float,
    decay: float,
    eps: float,
) -> None:
    """Update one weight and its moments in place.

    Args:
        corrections: the learning rate over the first moment's bias correction, and one over the root of the
            second's.
        decay: weight decay times learning rate.
    """
    size, moments, group = weight.numel(), list[torch.Tensor | None](), GROUP
    for name in ("exp_avg", "exp_avg_sq"):
        scale = state.get(f"{name}_scale")
        moments += [state[name if scale is None else f"{name}_code"], scale]
        group = group if scale is None else size // max(1, scale.numel())
    if not size:
        return
    rows = BLOCK // group
    adamw[(triton.cdiv(size, BLOCK),)](
        weight, gradient, *moments, corrections, found_inf, size, beta1, 1 - beta1, beta2, 1 - beta2,
        decay, eps, R=rows, G=group, num_warps=4,
    )  # fmt: skip
