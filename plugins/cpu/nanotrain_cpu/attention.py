"""Causal attention for short sequences, in blocks of queries that keep their probabilities.

Shapes: B batch, S sequence, H query heads, G key and value heads, K size of a query and key, V size of a
value, R query rows of one block, C keys that a block sees, N batch times key heads, each a matrix of its own.

torch's CPU kernel uses tiles that are too small for the matrix units of a processor. Computing in blocks of
queries skips most of the scores that the causal mask hides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from nanotrain_core.api.torch import TORCH_OPS

#: Longest sequence whose probabilities are kept for the backward pass: S numbers per query.
SHORT = 1024

#: Tokens of one block of queries.
BLOCK = 64


def attention(
    q_BSHK: torch.Tensor,
    k_BSGK: torch.Tensor,
    v_BSGV: torch.Tensor,
    scale: float | None = None,
    starts_BT: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Return what :func:`nanotrain_core.models.ops.attention` does; calls it for long sequences.

    It also calls it with fewer queries than keys, as after cached tokens (generation needs no backward pass),
    for documents that do not attend to each other, and for windows.
    """
    if starts_BT is not None or window is not None:
        return TORCH_OPS.attention(q_BSHK, k_BSGK, v_BSGV, scale, starts_BT, window)
    after_others = q_BSHK.shape[1] != k_BSGK.shape[1]
    if q_BSHK.shape[1] > SHORT or after_others or not q_BSHK.numel():
        return TORCH_OPS.attention(q_BSHK, k_BSGK, v_BSGV, scale)
    scale = q_BSHK.shape[-1] ** -0.5 if scale is None else scale
    y: torch.Tensor = _Short.apply(q_BSHK, k_BSGK, v_BSGV, scale)  # type: ignore[no-untyped-call]
    return y


class _Short(torch.autograd.Function):
    """Forward saves the probabilities of every block. Backward: Dao et al., arXiv 2205.14135, appendix B.2.

    Each product is written to a tensor of its own: into a part of a larger tensor, torch multiplies one
    matrix at a time, which takes twice as long.
    """

    @staticmethod
    def forward(
        ctx: Any, q_BSHK: torch.Tensor, k_BSGK: torch.Tensor, v_BSGV: torch.Tensor, scale: float
    ) -> torch.Tensor:
        shared = q_BSHK.shape[2] // k_BSGK.shape[2]
        q, k, v = _rows(q_BSHK, shared), _rows(k_BSGK), _rows(v_BSGV)
        y_BSHV = q.new_empty(*q_BSHK.shape[:3], v.shape[-1])
        hidden, probabilities = _mask(shared, q), []
        for rows, queries in _blocks(k.shape[1], shared):
            p_NRC = _scaled(q[:, queries], k[:, : rows.stop].transpose(1, 2), scale)
            diagonal = p_NRC[:, :, rows]
            diagonal.add_(hidden[: diagonal.shape[1], : diagonal.shape[2]])
            torch.softmax(p_NRC, -1, out=p_NRC)
            _fill(y_BSHV[:, rows], torch.bmm(p_NRC, v[:, : rows.stop]), shared)
            probabilities.append(p_NRC)
        ctx.save_for_backward(q, k, v, *probabilities)
        ctx.scale, ctx.shared = scale, shared
        return y_BSHV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_BSHV: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, *probabilities = ctx.saved_tensors
        scale, shared = ctx.scale, ctx.shared
        d_y, d_q_BSHK = _rows(d_y_BSHV, shared), q.new_empty(*d_y_BSHV.shape[:3], q.shape[-1])
        blocks, d_k, d_v = list(_blocks(k.shape[1], shared)), None, None
        for (rows, queries), p_NRC in zip(blocks[::-1], probabilities[::-1], strict=True):
            seen, d_block = slice(rows.stop), d_y[:, queries]
            d_p_NRC = torch.bmm(d_block, v[:, seen].transpose(1, 2))
            d_s_NRC = torch.ops.aten._softmax_backward_data(d_p_NRC, p_NRC, -1, p_NRC.dtype)
            _fill(d_q_BSHK[:, rows], _scaled(d_s_NRC, k[:, seen], scale), shared)
            d_k = _add(_scaled(d_s_NRC.transpose(1, 2), q[:, queries], scale), d_k)
            d_v = _add(torch.bmm(p_NRC.transpose(1, 2), d_block), d_v)
        batch = len(d_y_BSHV)
        return d_q_BSHK, _heads(d_k, batch), _heads(d_v, batch), None


def _add(x: torch.Tensor, total: torch.Tensor | None) -> torch.Tensor:
    """Add ``x`` to the first keys of ``total``; the last block, processed first, attends to all keys."""
    if total is None:
        return x
    total[:, : x.shape[1]].add_(x)
    return total


def _scaled(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Return ``scale`` a b, for each matrix."""
    return a.new_empty(*a.shape[:2], b.shape[2]).baddbmm_(a, b, beta=0, alpha=scale)


def _rows(x_BSHK: torch.Tensor, shared: int = 1) -> torch.Tensor:
    """Return [N, S * shared, K]: the query heads that share a key head as more rows of it."""
    batch, length, heads, size = x_BSHK.shape
    x = x_BSHK.reshape(batch, length, heads // shared, shared, size).transpose(1, 2)
    return x.reshape(-1, length * shared, size)


def _fill(out_BSHK: torch.Tensor, x: torch.Tensor, shared: int) -> None:
    """Write :func:`_rows` back."""
    batch, length, heads, size = out_BSHK.shape
    rows = x.view(batch, heads // shared, length, shared, size)
    out_BSHK.view(batch, length, heads // shared, shared, size).copy_(rows.transpose(1, 2))


def _heads(x: torch.Tensor | None, batch: int) -> torch.Tensor | None:
    """Turn :func:`_rows` of unshared heads back to [B, S, H, K], a view."""
    return None if x is None else x.view(batch, -1, *x.shape[1:]).transpose(1, 2)


def _blocks(length: int, shared: int) -> Iterator[tuple[slice, slice]]:
    """Yield the positions of each block, and its rows of a :func:`_rows` tensor."""
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        yield slice(start, stop), slice(start * shared, stop * shared)


def _mask(shared: int, like: torch.Tensor) -> torch.Tensor:
    """Return what is added to the scores of a block for its own keys: -inf where they come later, or 0."""
    hidden = torch.full((BLOCK, BLOCK), float("-inf"), dtype=like.dtype, device=like.device)
    return hidden.triu_(1).repeat_interleave(shared, dim=0)
