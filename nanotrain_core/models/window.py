"""Causal attention in which a token sees itself and the ``window`` - 1 tokens before it.

Shapes: B batch, S queries, those of the last of T tokens, H query heads, G key and value heads, K size of a
query and key, V size of a value, R queries of one block, C the tokens that they see.

Sources: Child et al., arXiv 1904.10509 (local attention); Jiang et al., arXiv 2310.06825 (Mistral).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

Tensor = torch.Tensor

#: Fewest queries of a block. Others have as many as a window has tokens, and see twice as many at most.
SMALLEST_BLOCK = 64


def tokens_seen(length: int, window: int | None) -> float:
    """Return how many tokens one of ``length`` sees on average, itself counted as a half.

    >>> tokens_seen(8, None), tokens_seen(8, 8), tokens_seen(8, 2)
    (4.0, 4.0, 1.75)
    """
    return length / 2 if not window or length <= window else window - window**2 / (2 * length)


def window_attention(
    q_BSHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    scale: float | None,
    starts_BT: Tensor | None,
    window: int,
) -> Tensor:
    """Return attention [B, S, H, V] of one block of queries after the other, each to the tokens that it sees.

    Memory is that of the queries times twice the window at most, where one mask for all has T columns.

    Arguments are those of :func:`~nanotrain_core.models.ops.attention`.
    """
    queries, tokens = q_BSHK.shape[1], k_BTGK.shape[1]
    shared, block, before = q_BSHK.shape[2] != k_BTGK.shape[2], max(window, SMALLEST_BLOCK), tokens - queries
    rows = min(block, queries)
    seen_RC = q_BSHK.new_ones(rows, rows + window - 1, dtype=torch.bool).triu().tril(window - 1)
    # Of the queries' dtype, and one for all blocks: PyTorch keeps a copy of each other mask for backward.
    mask_RC = torch.zeros_like(seen_RC, dtype=q_BSHK.dtype).masked_fill(~seen_RC, float("-inf"))
    found = []
    for begin in range(before, tokens, block):
        end, first = min(begin + block, tokens), begin - window + 1
        low = max(0, first)
        mask = mask_RC[: end - begin, low - first : end - first]
        if starts_BT is not None:
            hidden_BRC = torch.arange(low, end, device=mask.device) < starts_BT[:, begin:end, None]
            mask = mask.masked_fill(hidden_BRC.unsqueeze(1), float("-inf"))
        q = q_BSHK[:, begin - before : end - before].transpose(1, 2)
        k, v = (x[:, low:end].transpose(1, 2) for x in (k_BTGK, v_BTGV))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=shared)
        found.append(y)
    return torch.cat(found, 2).transpose(1, 2)
