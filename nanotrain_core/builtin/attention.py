"""Causal attention: torch's own, and on a CPU for short sequences one that is faster.

Shapes: B batch, S sequence, H query heads, G key and value heads, K size of a query and key, V size of a
value, R query rows of one block, C keys that a block sees, N batch times key heads, each a matrix of its own.

torch's CPU kernel works on small tiles, for which matrix units of a processor are too wide: with
256 tokens it takes 1.4 times as long as the products here in float32, and 3.5 times in bfloat16. Blocks of
queries leave out most of what the causal mask hides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

#: Longest sequence whose probabilities are kept for the backward pass on a CPU: S numbers per query.
SHORT = 1024

#: Tokens of one block of queries.
BLOCK = 64


def causal_attention(
    q_BSHK: torch.Tensor, k_BSGK: torch.Tensor, v_BSGV: torch.Tensor, *, scale: float | None = None
) -> torch.Tensor:
    """Return softmax(q k^T ``scale``) v [B, S, H, V] where no token sees a later one.

    H is a multiple of G: consecutive query heads share a key and value head. ``scale`` is 1 / sqrt(K)
    by default.
    """
    scale = q_BSHK.shape[-1] ** -0.5 if scale is None else scale
    if q_BSHK.device.type == "cpu" and q_BSHK.shape[1] <= SHORT:
        y: torch.Tensor = _Short.apply(q_BSHK, k_BSGK, v_BSGV, scale)  # type: ignore[no-untyped-call]
        return y
    return F.scaled_dot_product_attention(
        q_BSHK.transpose(1, 2),
        k_BSGK.transpose(1, 2),
        v_BSGV.transpose(1, 2),
        is_causal=True,
        scale=scale,
        enable_gqa=q_BSHK.shape[2] != k_BSGK.shape[2],
    ).transpose(1, 2)


class _Short(torch.autograd.Function):
    """Forward keeps every block's probabilities. Backward: Dao et al., arXiv 2205.14135, appendix B.2."""

    @staticmethod
    def forward(
        ctx: Any, q_BSHK: torch.Tensor, k_BSGK: torch.Tensor, v_BSGV: torch.Tensor, scale: float
    ) -> torch.Tensor:
        shared = q_BSHK.shape[2] // k_BSGK.shape[2]
        q, k, v = _rows(q_BSHK, shared), _rows(k_BSGK), _rows(v_BSGV)
        y = q.new_empty(*q.shape[:2], v.shape[-1])
        probabilities, nothing, mask = [], q.new_zeros(1), _mask(shared, q)
        for rows, queries in _blocks(k.shape[1], shared):
            keys = k[:, : rows.stop].transpose(1, 2)
            scores_NRC = torch.baddbmm(nothing, q[:, queries], keys, beta=0, alpha=scale)
            own_NRR = scores_NRC[:, :, rows.start :]
            own_NRR.add_(mask[: own_NRR.shape[1], : own_NRR.shape[2]])
            p_NRC = torch.softmax(scores_NRC, -1)
            torch.bmm(p_NRC, v[:, : rows.stop], out=y[:, queries])
            probabilities.append(p_NRC)
        ctx.save_for_backward(q, k, v, y, *probabilities)
        ctx.scale, ctx.heads, ctx.shared = scale, k_BSGK.shape[2], shared
        return _heads(y, ctx.heads, shared)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_BSHV: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, y, *probabilities = ctx.saved_tensors
        d_y = _rows(d_y_BSHV, ctx.shared)
        along = (d_y * y).sum(-1, keepdim=True)
        d_q, d_k, d_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        blocks = _blocks(k.shape[1], ctx.shared)
        for (rows, queries), p_NRC in zip(blocks, probabilities, strict=True):
            seen, d_block = slice(rows.stop), d_y[:, queries]
            d_v[:, seen].baddbmm_(p_NRC.transpose(1, 2), d_block)
            d_p_NRC = torch.bmm(d_block, v[:, seen].transpose(1, 2))
            d_s_NRC = d_p_NRC.sub_(along[:, queries]).mul_(p_NRC)
            torch.bmm(d_s_NRC, k[:, seen], out=d_q[:, queries])
            d_k[:, seen].baddbmm_(d_s_NRC.transpose(1, 2), q[:, queries], alpha=ctx.scale)
        heads, shared = ctx.heads, ctx.shared
        return _heads(d_q.mul_(ctx.scale), heads, shared), _heads(d_k, heads), _heads(d_v, heads), None


def _rows(x_BSHK: torch.Tensor, shared: int = 1) -> torch.Tensor:
    """Return [N, S * shared, K]: the query heads that share a key head as more rows of it."""
    batch, length, heads, size = x_BSHK.shape
    x = x_BSHK.reshape(batch, length, heads // shared, shared, size).transpose(1, 2)
    return x.reshape(-1, length * shared, size)


def _heads(x: torch.Tensor, heads: int, shared: int = 1) -> torch.Tensor:
    """Turn :func:`_rows` back to [B, S, H, K]."""
    count, rows, size = x.shape
    x = x.view(count // heads, heads, rows // shared, shared, size).transpose(1, 2)
    return x.reshape(count // heads, rows // shared, heads * shared, size)


def _blocks(length: int, shared: int) -> Iterator[tuple[slice, slice]]:
    """Yield the positions of each block, and its rows of a :func:`_rows` tensor."""
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        yield slice(start, stop), slice(start * shared, stop * shared)


def _mask(shared: int, like: torch.Tensor) -> torch.Tensor:
    """Return 0 where a query of a block sees one of the keys in it, and -inf where that comes later."""
    hidden = torch.full((BLOCK, BLOCK), float("-inf"), dtype=like.dtype, device=like.device)
    return hidden.triu_(1).repeat_interleave(shared, dim=0)
