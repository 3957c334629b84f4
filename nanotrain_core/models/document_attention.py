"""Attention within the documents of a sequence, by torch's FlexAttention, which skips what they hide.

Shapes: B batch, T tokens, H query heads, G key and value heads, K size of a query and key, V size of a value,
N blocks of 128 tokens. Source: Dong et al., arXiv 2412.05496 (FlexAttention).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Tensor = torch.Tensor

#: Queries and keys of a block, which is computed as a whole, with a mask, or not at all.
BLOCK = 128


def document_attention(
    q_BTHK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, scale: float | None, starts_BT: Tensor, window: int | None
) -> Tensor:
    """Return :func:`nanotrain_core.models.ops.attention` of as many queries as keys, in a compiled graph."""
    from torch.nn.attention.flex_attention import flex_attention  # imports torch's compiler

    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BTGK, v_BTGV))
    shared = q.shape[1] != k.shape[1]
    y = flex_attention(q, k, v, block_mask=block_mask(starts_BT, window), scale=scale, enable_gqa=shared)
    assert isinstance(y, Tensor)
    return y.transpose(1, 2)


def block_mask(starts_BT: Tensor, window: int | None) -> BlockMask:
    """Return which blocks of keys a block of queries sees, and which of these need no mask.

    No count is read by the host. A query sees all tokens from its document's first one, or its window's, up
    to itself. Neither of these decreases from one query to the next, so that a block sees consecutive blocks.
    """
    from torch.nn.attention.flex_attention import BlockMask

    tokens, device = starts_BT.shape[1], starts_BT.device
    low_BT = starts_BT
    if window is not None:
        low_BT = low_BT.maximum(torch.arange(tokens, device=device) - (window - 1))
    low_BT = low_BT.to(torch.int32)
    first_N = torch.arange(0, tokens, BLOCK, device=device, dtype=torch.int32)
    last_N = (first_N + BLOCK - 1).clamp(max=tokens - 1)
    at_N = first_N // BLOCK
    seen_BN = low_BT[:, first_N] // BLOCK
    full_BN = ((low_BT[:, last_N] + BLOCK - 1) // BLOCK).minimum(at_N)
    if tokens % BLOCK:  # as torch does: no block of an incomplete one's is whole
        full_BN = full_BN.where(at_N < tokens // BLOCK, at_N)
    before_BN1, at_N1 = (full_BN - seen_BN).unsqueeze(-1), at_N.unsqueeze(-1)
    masked_BNN = (seen_BN.unsqueeze(-1) + at_N).where(at_N < before_BN1, at_N1)  # and its own, the last
    whole_BNN = (full_BN.unsqueeze(-1) + at_N).clamp(max=len(at_N) - 1)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= low_BT[batch, query]) & (key <= query)

    return BlockMask.from_kv_blocks(
        (full_BN - seen_BN + 1).unsqueeze(1),
        masked_BNN.unsqueeze(1),
        (at_N - full_BN).unsqueeze(1),
        whole_BNN.unsqueeze(1),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(tokens, tokens),
    )
