"""Attention statistics of monitored layers: largest logit and entropy, over a few queries of each sequence.

Attention kernels apply softmax internally and return no scores, so the scores of these queries are computed
again from the inputs of the attention call: the rotated queries and keys of this rank's heads.

Shapes: B batch, S sequence, T tokens of keys, of which the queries are the last S, H query heads, G key
heads, N query heads for each of these, R queries that are read, K and V sizes of a query and of a value head.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from nanotrain_health.watcher import Scene, Watcher


class Attention(Watcher):
    """Observes attention calls of monitored layers, with any kernels, and inside compiled layers as well."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self.queries = scene.config.queries
        if self.queries and scene.sentinels:
            names = sorted(scene.sentinels)
            scene.run.observe_calls("attention", self.look, names, when=scene.reads_tensors)

    def look(
        self,
        name: str,
        q_BSHK: torch.Tensor,
        k_BTGK: torch.Tensor,
        v_BTGV: torch.Tensor,
        scale: float | None = None,
        starts_BT: torch.Tensor | None = None,
        window: int | None = None,
    ) -> None:
        """Publish what a layer attends to in one microbatch."""
        most, entropy, ratio = attended(q_BSHK, k_BTGK, scale, self.queries, starts_BT, window)
        batch, _, heads, _ = q_BSHK.shape
        metrics = self.scene.metrics
        metrics.scalar(f"attention/max_logit/{name}", most)
        metrics.scalar(f"attention/entropy/{name}", entropy, weight=batch * heads)
        metrics.scalar(f"attention/entropy_ratio/{name}", ratio, weight=batch * heads)


def attended(
    q_BSHK: torch.Tensor,
    k_BTGK: torch.Tensor,
    scale: float | None,
    queries: int,
    starts_BT: torch.Tensor | None = None,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the largest logit, the mean entropy in nats, and the mean ratio of entropy to its maximum.

    The maximum is the logarithm of the number of tokens that a query sees. Scores are computed in the dtype
    of the tensors, and softmax in at least float32. The code uses few operators: launching one takes longer
    than its arithmetic on so few numbers.

    Args:
        q_BSHK, k_BTGK: as attention is called with them: H is a multiple of G.
        scale: factor of the dot products, 1 / sqrt(K) by default.
        queries: number of queries per sequence, see :func:`positions`.
        starts_BT: where each token's document begins, if tokens attend only to their own document.
        window: how many tokens one attends to, if not to all.
    """
    length, groups = k_BTGK.shape[1:3]
    before = length - q_BSHK.shape[1]
    wide = torch.promote_types(q_BSHK.dtype, torch.float32)
    at = positions(length, queries, q_BSHK.device, wide, before)
    scale = q_BSHK.shape[-1] ** -0.5 if scale is None else scale
    rows_R = at.rows_R - before if before else at.rows_R
    q_BRGNK = torch.unflatten(torch.index_select(q_BSHK, 1, rows_R), 2, (groups, -1))
    q_BGXK = q_BRGNK.permute(0, 2, 3, 1, 4).flatten(2, 3)  # X: N x R
    scores = q_BGXK @ k_BTGK.permute(0, 2, 3, 1)
    scores_BGNRT = torch.unflatten(scores.to(wide), 2, (-1, len(at.rows_R)))
    hidden_BGNRT = torch.add(at.mask_RT, scores_BGNRT, alpha=scale)
    share_BR1 = at.share_R.unsqueeze(-1)
    starts_BR = None if starts_BT is None else torch.index_select(starts_BT, 1, at.rows_R)
    if window is not None:
        first_1R = (at.rows_R - (window - 1)).clamp(min=0).unsqueeze(0)
        starts_BR = first_1R if starts_BR is None else torch.maximum(starts_BR, first_1R)
    if starts_BR is not None:
        before_BRT = torch.arange(length, device=starts_BR.device) < starts_BR.unsqueeze(-1)
        hidden_BGNRT = hidden_BGNRT.masked_fill(before_BRT[:, None, None], -torch.inf)
        share_BR1 = share(at.rows_R - starts_BR + 1, wide)[:, None, :, None]
    entropy_BGNR = torch.special.entr(torch.softmax(hidden_BGNRT, -1)).sum(-1)
    return hidden_BGNRT.amax(), entropy_BGNR.mean(), (entropy_BGNR @ share_BR1).mean()


def share(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return weights [..., R]: the sum of weight times entropy is the mean ratio of entropy to log(seen).

    ``seen`` is the number of tokens that each query sees. The mean is over queries that see more than one.
    """
    several = seen > 1  # a query that sees only itself always has entropy 0
    possible = seen.to(dtype).log().masked_fill(~several, 1.0)
    return several / possible / several.sum(-1, keepdim=True).clamp(min=1)


class Positions(NamedTuple):
    """The queries that are read of a sequence, with the causal mask and the weights for their positions."""

    rows_R: torch.Tensor
    mask_RT: torch.Tensor
    """0, and minus infinity at the tokens after a query."""
    share_R: torch.Tensor
    """Weights that give the mean ratio of entropy to that of uniform attention, see :func:`share`."""


@lru_cache(maxsize=16)
def positions(
    length: int, queries: int, device: torch.device, dtype: torch.dtype, before: int = 0
) -> Positions:
    """Return the positions of at most ``queries`` queries [R], spread evenly, the last one among them.

    Of ``length`` tokens the first ones have no queries: those ``before`` them.

    >>> [positions(n, 3, torch.device("cpu"), torch.float32).rows_R.tolist() for n in (8, 2)]
    [[1, 4, 7], [0, 1]]
    """
    own = length - before
    count = min(queries, own)
    rows_R = torch.tensor([before + own * (n + 1) // count - 1 for n in range(count)])
    later_RT = torch.arange(length) > rows_R[:, None]
    mask_RT = torch.zeros(count, length, dtype=dtype).masked_fill_(later_RT, -torch.inf)
    each = (rows_R, mask_RT, share(rows_R + 1, dtype))
    return Positions(*(tensor.to(device, non_blocking=True) for tensor in each))
