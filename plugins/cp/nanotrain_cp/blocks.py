"""Attention to one block of keys out of several, and its gradients: by hand, or with torch's flash operators.

Shapes: B batch, S queries, T keys of the block, H query heads, G key and value heads, N = H / G, K and V size
    of a query and of a value.

Source: Dao, "FlashAttention-2", arXiv 2307.08691: gradients of a block follow from the output and the
log-sum-exp of each query over all keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
aten = torch.ops.aten

#: Queries whose scores exist at once, where they are computed by hand.
ROWS = 256


class Mask(NamedTuple):
    """Which keys of a block a query sees: those from ``starts_BS`` on, up to its own position."""

    queries_S: Tensor
    keys_T: Tensor
    """Positions in the whole sequence."""
    starts_BS: Tensor | None = None

    def hidden(self, rows: slice) -> Tensor:
        """Return the mask [B or 1, 1, 1, s, T] of keys that some queries do not see."""
        hidden = self.keys_T > self.queries_S[rows, None]
        if self.starts_BS is not None:
            hidden = hidden | (self.keys_T < self.starts_BS[:, rows, None])
        return hidden.view(-1, 1, 1, *hidden.shape[-2:])


def attend_block(
    q_BSHK: Tensor, kv_BTGX: Tensor, scale: float, mask: Mask | None, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return attention to a block [B, S, H, V], and the log-sum-exp [B, H, S] of its scores.

    Of a query that sees none of the keys they are 0 and minus infinity.

    Args:
        q_BSHK: queries.
        kv_BTGX: keys, each followed by its value.
        scale: factor of the products.
        mask: which keys are seen, if documents share a sequence.
        causal: without a mask, whether queries see the keys up to their own, of as many; otherwise all.
    """
    k, v = _split(kv_BTGX, q_BSHK)
    if mask is None and has_flash(q_BSHK, v):
        return _flash(q_BSHK, k, v, scale, causal)
    k, v = k.to(wide(k)), v.to(wide(v))
    B, S, H, _ = q_BSHK.shape
    out_BSHV, lse_BHS = v.new_empty(B, S, H, v.shape[3]), v.new_empty(B, H, S)
    for rows, scores_BGNST in _scores(q_BSHK, k, scale, mask, causal):
        lse = scores_BGNST.logsumexp(-1, keepdim=True)
        p_BGNST = (scores_BGNST - lse.clamp(min=torch.finfo(lse.dtype).min)).exp()
        out_BSHV[:, rows] = torch.einsum("bgnst,btgv->bsgnv", p_BGNST, v).flatten(2, 3)
        lse_BHS[..., rows] = lse.squeeze(-1).flatten(1, 2)
    return out_BSHV, lse_BHS


def block_gradients(
    d_out_BSHV: Tensor,
    q_BSHK: Tensor,
    out_BSHV: Tensor,
    lse_BHS: Tensor,
    kv_BTGX: Tensor,
    scale: float,
    mask: Mask | None,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Return a block's part of the gradient of queries, and these queries' of its keys and values.

    Args:
        d_out_BSHV: gradient of the output.
        q_BSHK: queries.
        out_BSHV: attention to all blocks.
        lse_BHS: of the scores of all blocks.
        kv_BTGX: and the others: see :func:`attend_block`.
        scale: factor of the products.
        mask: which keys are seen.
        causal: without a mask, whether queries see the keys up to their own.
    """
    k, v = _split(kv_BTGX, q_BSHK)
    if mask is None and has_flash(q_BSHK, v):
        return _flash_gradients(d_out_BSHV, q_BSHK, out_BSHV, lse_BHS, k, v, scale, causal)
    k, v, groups = k.to(lse_BHS.dtype), v.to(lse_BHS.dtype), k.shape[2]
    d_q, d_k, d_v = (torch.zeros_like(x, dtype=lse_BHS.dtype) for x in (q_BSHK, k, v))
    for rows, scores_BGNST in _scores(q_BSHK, k, scale, mask, causal):
        q, out, d_out = (_grouped(x[:, rows], k) for x in (q_BSHK, out_BSHV, d_out_BSHV))
        lse_BGNS1 = lse_BHS[..., rows].unflatten(1, (groups, -1)).unsqueeze(-1)  # type: ignore[no-untyped-call]
        p_BGNST = (scores_BGNST - lse_BGNS1).exp()
        d_p_BGNST = torch.einsum("bsgnv,btgv->bgnst", d_out, v)
        dots_BGNS1 = (out * d_out).sum(-1).permute(0, 2, 3, 1).unsqueeze(-1)
        d_s_BGNST = p_BGNST * (d_p_BGNST - dots_BGNS1) * scale
        d_v += torch.einsum("bgnst,bsgnv->btgv", p_BGNST, d_out)
        d_k += torch.einsum("bgnst,bsgnk->btgk", d_s_BGNST, q)
        d_q[:, rows] = torch.einsum("bgnst,btgk->bsgnk", d_s_BGNST, k).flatten(2, 3)
    return d_q, torch.cat((d_k, d_v), -1)


def _split(kv_BTGX: Tensor, q_BSHK: Tensor) -> tuple[Tensor, Tensor]:
    size = q_BSHK.shape[-1]
    return kv_BTGX[..., :size], kv_BTGX[..., size:]


def _grouped(x_BSHK: Tensor, like_BTGK: Tensor) -> Tensor:
    """Return [B, S, G, N, K], in the dtype of ``like``."""
    grouped: Tensor = x_BSHK.to(like_BTGK.dtype).unflatten(2, (like_BTGK.shape[2], -1))  # type: ignore[no-untyped-call]
    return grouped


def wide(x: Tensor) -> torch.dtype:
    """Return the dtype in which scores of ``x`` are computed and outputs merged: at least float32."""
    return torch.promote_types(x.dtype, torch.float32)


def _scores(
    q_BSHK: Tensor, k_BTGK: Tensor, scale: float, mask: Mask | None, causal: bool
) -> Iterator[tuple[slice, Tensor]]:
    """Yield some queries, and their scores [B, G, N, s, T]: minus infinity where a key is hidden."""
    if mask is None and causal:
        mask = Mask(*(torch.arange(x.shape[1], device=x.device) for x in (q_BSHK, k_BTGK)))
    for start in range(0, q_BSHK.shape[1], ROWS):
        rows = slice(start, start + ROWS)
        scores_BGNST = torch.einsum("bsgnk,btgk->bgnst", _grouped(q_BSHK[:, rows], k_BTGK), k_BTGK) * scale
        if mask is not None:
            scores_BGNST.masked_fill_(mask.hidden(rows), -torch.inf)
        yield rows, scores_BGNST


# --- torch's flash operators ------------------------------------------------------------------------


def has_flash(q: Tensor, v: Tensor) -> bool:
    """Return whether torch has a flash operator for queries ``q`` and values ``v``; on ``meta`` it has."""
    if not q.is_cuda:
        return q.device.type in ("cpu", "meta")
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and _padded_size(q, v) <= 256
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
    )


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    padded, size = _padded((q, k, v), _padded_size(q, v)), v.shape[-1]
    operator = aten._scaled_dot_product_flash_attention
    if _on_host(q):
        operator = aten._scaled_dot_product_flash_attention_for_cpu
    out, lse_BHS = operator(*padded, 0.0, causal, scale=scale)[:2]
    return out.transpose(1, 2)[..., :size], lse_BHS


def _flash_gradients(
    d_out: Tensor, q: Tensor, out: Tensor, lse_BHS: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    given = (*_padded((d_out, q, k, v, out), _padded_size(q, v)), lse_BHS.contiguous())
    if _on_host(q):
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, causal, scale=scale)
    else:  # without nested sequences and dropout, whose arguments these are
        lengths, random = (None, None, q.shape[1], k.shape[1]), q.new_empty(2, dtype=torch.uint64)
        found = aten._scaled_dot_product_flash_attention_backward(
            *given, *lengths, 0.0, causal, random, random[0], scale=scale
        )
    sizes = (q.shape[-1], k.shape[-1], v.shape[-1])
    d_q, d_k, d_v = (x.transpose(1, 2)[..., :size] for x, size in zip(found, sizes, strict=True))
    return d_q, torch.cat((d_k, d_v), -1)


def _on_host(q: Tensor) -> bool:
    """Return whether the operator is that of a CPU; on ``meta``, where the device is not known, by dtype."""
    return not q.is_cuda and (not q.is_meta or q.dtype not in (torch.bfloat16, torch.float16))


def _padded_size(q: Tensor, v: Tensor) -> int:
    """Return the size of heads that operators take, of queries and values; on GPUs a multiple of 8."""
    size = max(q.shape[-1], v.shape[-1])
    return size if _on_host(q) else -(-size // 8) * 8


def _padded(each: tuple[Tensor, ...], size: int) -> list[Tensor]:
    """Return tensors [B, S, H, K] as [B, H, S, size]; zeros change neither scores nor outputs."""
    sizes = (size - x.shape[-1] for x in each)
    return [(F.pad(x, (0, more)) if more else x).transpose(1, 2) for x, more in zip(each, sizes, strict=True)]
