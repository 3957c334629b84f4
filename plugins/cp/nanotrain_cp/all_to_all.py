"""DeepSpeed-Ulysses: two all-to-alls around attention exchange tokens for heads, and back.

Shapes: R ranks, B batch, S sequence, s this rank's part of it, H heads, h = H / R, K size of a head.

Source: Jacobs et al., arXiv 2309.14509.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nanotrain_core.api import NanotrainError
from nanotrain_cp.collectives import AllToAll, Ranks

Tensor = torch.Tensor


def attend(
    ranks: Ranks, length: int, attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *more: Any
) -> Tensor:
    """Attend with h heads to all tokens; q [B, s, H, K], k, v and what is returned have all heads."""
    if wrong := [x.shape[2] for x in (q, k) if x.shape[2] % ranks.size]:
        raise NanotrainError(
            f'cp: {wrong[0]} heads do not divide by cp = {ranks.size}; communication = "all_gather" in '
            '[[parallel]] use = "cp" takes any number'
        )
    parts = ranks.parts(length)
    y = attention(*(_to_heads(x, ranks, parts) for x in (q, k, v)), *more).transpose(0, 1)
    y = _all_to_all(y, ranks, [parts[ranks.index]] * ranks.size, parts)
    return torch.unflatten(y, 0, (ranks.size, -1)).permute(2, 1, 0, 3, 4).flatten(2, 3)


def _to_heads(x: Tensor, ranks: Ranks, parts: list[int]) -> Tensor:
    """Send tokens x [B, s, H, K] to the ranks of their heads; return [B, S, h, K]."""
    sent = torch.unflatten(x, 2, (ranks.size, -1)).permute(2, 1, 0, 3, 4).flatten(0, 1)
    return _all_to_all(sent, ranks, parts, [x.shape[1]] * ranks.size).transpose(0, 1)


def _all_to_all(x: Tensor, ranks: Ranks, received: list[int], sent: list[int]) -> Tensor:
    rows: Tensor = AllToAll.apply(x, ranks, received, sent)  # type: ignore[no-untyped-call]
    return rows
