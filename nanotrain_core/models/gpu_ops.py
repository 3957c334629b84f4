"""Functions that models call, where PyTorch has a faster way on a GPU: same values, to rounding.

Shapes are those of :mod:`~nanotrain_core.models.ops`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F

from nanotrain_core.models import cross_entropy, ops
from nanotrain_core.models.document_attention import document_attention
from nanotrain_core.models.ops import TORCH_OPS, Ops, Tensor


def plain_ops(device: torch.device) -> Ops:
    """Return plain PyTorch for a device: on a GPU the loss's products have a multiple of 128 columns."""
    if device.type != "cuda":
        return TORCH_OPS
    loss = partial(cross_entropy.linear_cross_entropy, matmul=matmul, multiple=128)
    return replace(TORCH_OPS, attention=attention, linear_cross_entropy=loss)


def attention(
    q_BSHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    scale: float | None = None,
    starts_BT: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Return :func:`nanotrain_core.models.ops.attention`, without a mask where a kernel needs none."""
    queries, tokens = q_BSHK.shape[1], k_BTGK.shape[1]
    hidden = window if window is not None and window < tokens else None
    if starts_BT is not None:
        if queries == tokens and has_document_kernel(q_BSHK):
            return document_attention(q_BSHK, k_BTGK, v_BTGV, scale, starts_BT, hidden)
    elif hidden is not None and queries > 1:
        if has_window_kernel(q_BSHK, v_BTGV):
            return window_attention(q_BSHK, k_BTGK, v_BTGV, scale, hidden)
    elif 1 < queries < tokens and not torch.compiler.is_compiling():
        return _attention_of_last(q_BSHK, k_BTGK, v_BTGV, scale)
    return ops.attention(q_BSHK, k_BTGK, v_BTGV, scale, starts_BT, window)


def _attention_of_last(q_BSHK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, scale: float | None) -> Tensor:
    """Return attention of the last queries of more tokens, which FlashAttention has."""
    from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler

    q, k, v = (x.transpose(1, 2) for x in (q_BSHK, k_BTGK, v_BTGV))
    later, shared = causal_lower_right(q.shape[2], k.shape[2]), q.shape[1] != k.shape[1]
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=later, scale=scale, enable_gqa=shared)
    return y.transpose(1, 2)


def has_document_kernel(q_BSHK: Tensor) -> bool:
    """Return whether a GPU has a kernel that masks documents: inductor makes it, for a compiled graph."""
    half = q_BSHK.dtype in (torch.float16, torch.bfloat16)
    return q_BSHK.is_cuda and half and torch.compiler.is_compiling()


def has_window_kernel(q_BSHK: Tensor, v_BTGV: Tensor) -> bool:
    """Return whether a GPU has one kernel for it: FlashAttention's, from Ampere on, for heads up to 192."""
    size = q_BSHK.shape[3]
    fits = q_BSHK.dtype in (torch.float16, torch.bfloat16) and size == v_BTGV.shape[3] <= 192 and not size % 8
    return q_BSHK.is_cuda and fits and torch.cuda.get_device_properties(q_BSHK.device).major >= 8


def window_attention(
    q_BSHK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, scale: float | None, window: int
) -> Tensor:
    """Return attention with a window in one kernel, which needs no mask and skips what it hides."""
    from torch.nn.attention.varlen import varlen_attn  # imports torch's compiler

    batch, queries, tokens = len(q_BSHK), q_BSHK.shape[1], k_BTGK.shape[1]
    ends = torch.arange(batch + 1, device=q_BSHK.device, dtype=torch.int32)
    q, k, v = (x.flatten(0, 1) for x in (q_BSHK, k_BTGK, v_BTGV))
    # Older versions share key heads without being asked.
    shares: dict[str, Any] = {}
    if q.shape[1] != k.shape[1] and "enable_gqa" in signature(varlen_attn).parameters:
        shares = {"enable_gqa": True}
    before = (window - 1, 0)  # how many tokens before itself, and after, one sees
    y = varlen_attn(
        q, k, v, ends * queries, ends * tokens, queries, tokens, scale=scale, window_size=before, **shares
    )
    assert isinstance(y, Tensor)
    return y.view(batch, queries, *y.shape[1:])


def matmul(left: Tensor, right: Tensor, total: Tensor | None = None) -> Tensor:
    """Multiply as plain PyTorch does, but bf16 or fp16 into a float32 total without rounding the product."""
    if total is None or left.dtype == total.dtype or not left.is_cuda or torch.compiler.is_compiling():
        return cross_entropy.matmul(left, right, total)
    # Into `total` itself: a product of its own would be written, and read again to be added.
    return torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
