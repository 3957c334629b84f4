"""RMSNorm and RoPE with explicit backward passes, which pass over memory less often than autograd's.

Shapes: ... any leading dimensions, N rows, as many as they have together, D width, B batch, S sequence,
H heads, K size of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from nanotrain_core.api.torch import TORCH_OPS

#: Elements of a norm's input below which call overhead dominates memory traffic: autograd is faster there.
FEW = 2**15


def rms_norm(x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Return what :func:`nanotrain_core.models.ops.rms_norm` does; of few numbers, that itself."""
    if x.numel() < FEW:
        return TORCH_OPS.rms_norm(x, weight_D, eps)
    y: torch.Tensor = _RMSNorm.apply(x, weight_D, eps)  # type: ignore[no-untyped-call]
    return y


def rope(x_BSHK: torch.Tensor, cos_S1K: torch.Tensor, sin_S1K: torch.Tensor) -> torch.Tensor:
    """Return what :func:`nanotrain_core.models.ops.rope` does."""
    y_BSHK: torch.Tensor = _RoPE.apply(x_BSHK, cos_S1K, sin_S1K)  # type: ignore[no-untyped-call]
    return y_BSHK


class _RMSNorm(torch.autograd.Function):
    """y = x r w with r = 1 / rms(x), in float32 at least. Kept for backward: x, and one number of each row.

    Source: Zhang and Sennrich, arXiv 1910.07467, equation 4.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w_D: torch.Tensor, eps: float) -> torch.Tensor:
        wide = _widened(x)
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        r = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, r, w_D)
        y: torch.Tensor = (wide * r).mul_(w_D)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """d_x = r (w d_y - x r^2 mean(x w d_y)); d_w = sum over rows of d_y x r."""
        x, r, w_D = ctx.saved_tensors
        x_ND, d_ND = (_widened(each).reshape(-1, len(w_D)) for each in (x, d_y))
        r_N1, wide_D, product_ND = r.reshape(-1, 1), _widened(w_D), d_ND * x_ND
        d_w_D = product_ND.T @ r_N1.flatten()
        mean_N1 = (product_ND @ wide_D).div_(len(w_D)).unsqueeze(1)
        d_x_ND = (d_ND * wide_D).addcmul_(x_ND, mean_N1 * r_N1.square(), value=-1).mul_(r_N1)
        return d_x_ND.view(x.shape).to(x.dtype), d_w_D.to(w_D.dtype), None


class _RoPE(torch.autograd.Function):
    """Forward turns; backward turns back.

    Whole heads at a time: arithmetic on halves of heads, 8 to 32 numbers in a row, takes twice as long.
    """

    @staticmethod
    def forward(ctx: Any, x_BSHK: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x_BSHK, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_BSHK: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turned(d_y_BSHK, cos, -sin), None, None


def _turned(x_BSHK: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    wide = x_BSHK.to(cos.dtype)
    return wide.roll(wide.shape[-1] // 2, -1).mul_(sin).addcmul_(wide, cos).to(x_BSHK.dtype)


def _widened(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
