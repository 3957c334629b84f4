"""Kernels of a dry run: what a device computes with one kernel is one operator, with its memory.

On ``meta`` torch takes attention apart, scores and all. Its fused operators have shapes there too, so they
are called by name: what is kept for backward, and by activation checkpointing, is then what they keep.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from nanotrain_core.api.torch import TORCH_OPS, Kernels, Ops, grouped_linear_on_gpu, plain_ops
from nanotrain_plan import DryKernelsConfig

Tensor = torch.Tensor
aten = torch.ops.aten


class DryKernels(Kernels):
    """Stands on ``meta`` for the kernels of whatever device a plan is for."""

    def __init__(self, config: DryKernelsConfig) -> None:
        self.config = config

    def ops(self, device: torch.device) -> Ops:
        """Return plain PyTorch with the kernels that it has on a GPU, or on a CPU; of ``meta`` alone."""
        if device.type != "meta":
            return TORCH_OPS
        if self.config.host:
            return replace(TORCH_OPS, attention=attention_on_host)
        loss = partial(plain_ops(torch.device("cuda")).linear_cross_entropy, matmul=matmul)
        return replace(
            TORCH_OPS, attention=attention, rms_norm=rms_norm, experts=experts, linear_cross_entropy=loss
        )


def attention(
    q_BSHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    scale: float | None = None,
    starts_BT: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Return what FlashAttention would, or cuDNN's kernel, which takes values of another size than keys.

    Of documents that do not see one another too, whose mask a kernel for them does not keep.

    Both keep q, k, v, the output and a log-sum-exp for each row, and no scores.
    Source: Dao, "FlashAttention-2", arXiv 2307.08691, algorithms 1 and 2.
    """
    if window is not None and window < k_BTGK.shape[1]:
        if q_BSHK.shape[-1] != v_BTGV.shape[-1]:
            return TORCH_OPS.attention(q_BSHK, k_BTGK, v_BTGV, scale, starts_BT, window)
        return _window_attention(q_BSHK, k_BTGK, v_BTGV, scale, window)
    q, k, v = (x.transpose(1, 2) for x in (q_BSHK, k_BTGK, v_BTGV))
    if q.shape[-1] == v.shape[-1]:
        out = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=scale)[0]
    else:
        out = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, scale=scale)[0]
    found: Tensor = out.transpose(1, 2)
    return found


def _window_attention(
    q_BSHK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, scale: float | None, window: int
) -> Tensor:
    """Return what FlashAttention's kernel for packed sequences would, which has windows."""
    import torch.nn.attention.varlen  # defines the operator, and imports torch's compiler

    (batch, S), T = q_BSHK.shape[:2], k_BTGK.shape[1]
    ends = torch.arange(batch + 1, dtype=torch.int32, device=q_BSHK.device)
    rows = (x.flatten(0, 1) for x in (q_BSHK, k_BTGK, v_BTGV))
    kernel = torch.ops.torch_attn._varlen_attn
    y: Tensor = kernel(*rows, ends * S, ends * T, S, T, False, scale, [window - 1, 0])[0]
    return y.view_as(q_BSHK)


def attention_on_host(
    q_BSHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    scale: float | None = None,
    starts_BT: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Return the same on a CPU, whose kernel takes values as wide as keys: of others torch keeps scores."""
    if window is not None and window < k_BTGK.shape[1] and q_BSHK.shape[-1] == v_BTGV.shape[-1]:
        with _KernelOfHost():
            return TORCH_OPS.attention(q_BSHK, k_BTGK, v_BTGV, scale, starts_BT, window)
    if starts_BT is not None or q_BSHK.shape[-1] != v_BTGV.shape[-1]:
        return TORCH_OPS.attention(q_BSHK, k_BTGK, v_BTGV, scale, starts_BT, window)
    q, k, v = (x.transpose(1, 2) for x in (q_BSHK, k_BTGK, v_BTGV))
    fewer = q.shape[2] != k.shape[2]  # queries than keys: the kernel keeps a mask
    mask_ST = q.new_zeros(q.shape[2], k.shape[2]) if fewer else None
    return _attend_on_host(q, k, v, mask_ST, is_causal=not fewer, scale=scale).transpose(1, 2)


def _attend_on_host(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    kernel = aten._scaled_dot_product_flash_attention_for_cpu
    out: Tensor = kernel(q, k, v, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return out


class _KernelOfHost(TorchFunctionMode):
    """Has the kernel where plain PyTorch asks for attention in a window: on ``meta`` torch takes it apart."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = _attend_on_host if func is F.scaled_dot_product_attention else func
        return function(*args, **(kwargs or {}))


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return a tensor like ``x``: one kernel each way, which keeps x and a number for each row."""
    out: Tensor = FusedRMSNorm.apply(x, weight_D)  # type: ignore[no-untyped-call]
    return out


class FusedRMSNorm(torch.autograd.Function):
    """Reads and writes what ``torch.rms_norm`` does on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight_D, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return x * weight_D.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, Tensor]:
        x, weight_D, _ = ctx.saved_tensors
        return d_y * x, torch.empty_like(weight_D)


def matmul(left: Tensor, right: Tensor, total: Tensor | None = None) -> Tensor:
    """Multiply as a GPU does for the loss: into float32 where the product is added to a total of float32."""
    if total is None:
        return left @ right
    if left.dtype != total.dtype:
        return total.add_(torch.mm(left, right, out_dtype=total.dtype))
    return total.addmm_(left, right)


def experts(rows_ND: Tensor, counts_E: Tensor, gate_EFD: Tensor, up_EFD: Tensor, down_EDF: Tensor) -> Tensor:
    """Return the experts' outputs [N, D], by grouped GEMMs where a GPU has them: see ``ops.experts``."""
    sizes = (*gate_EFD.shape[1:], rows_ND.shape[-1])
    if rows_ND.dtype != torch.bfloat16 or any(size % 8 for size in sizes) or not len(rows_ND):
        return TORCH_OPS.experts(rows_ND, counts_E, gate_EFD, up_EFD, down_EDF)
    gate_NF, up_NF = (grouped_linear_on_gpu(rows_ND, weight, counts_E) for weight in (gate_EFD, up_EFD))
    return grouped_linear_on_gpu(TORCH_OPS.swiglu(gate_NF, up_NF), down_EDF, counts_E)
