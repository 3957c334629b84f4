"""Attention of monitored layers: its largest logit and its entropy, over a few queries of every sequence.

Softmax is inside of the kernels that compute attention, so scores of these queries are computed once more, by
what attention was called with: rotated queries and keys, of this rank's heads.

Shapes: B batch, S sequence, H query heads, G key heads, N query heads for each of these, R queries that are
read, K and V sizes of a query and of a value head.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from nanotrain_health.watcher import Scene, Watcher


class Attention(Watcher):
    """Is told of the calls of attention, on any kernels, also inside of compiled layers."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self.queries = scene.config.queries
        if self.queries and scene.sentinels:
            names = sorted(scene.sentinels)
            scene.run.tap_calls("attention", self.look, names, when=scene.reads_tensors)

    def look(
        self,
        name: str,
        q_BSHK: torch.Tensor,
        k_BSGK: torch.Tensor,
        v_BSGV: torch.Tensor,
        scale: float | None = None,
    ) -> None:
        """Publish what a layer attends to in one microbatch."""
        most, entropy, ratio = attended(q_BSHK, k_BSGK, scale, self.queries)
        batch, _, heads, _ = q_BSHK.shape
        metrics = self.scene.metrics
        metrics.scalar(f"attention/max_logit/{name}", most)
        metrics.scalar(f"attention/entropy/{name}", entropy, weight=batch * heads)
        metrics.scalar(f"attention/entropy_ratio/{name}", ratio, weight=batch * heads)


def attended(
    q_BSHK: torch.Tensor, k_BSGK: torch.Tensor, scale: float | None, queries: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the largest logit, the mean entropy in nats, and its mean share of what is possible.

    Scores are made in the tensors' dtype and softmax in float32 at least. Few operators: each costs more than
    its numbers do.

    Args:
        q_BSHK, k_BSGK: as attention is called with them: H is a multiple of G.
        scale: what products are multiplied by, 1 / sqrt(K) by default.
        queries: of how many of each sequence, see :func:`positions`.
    """
    length, groups = k_BSGK.shape[1:3]
    wide = torch.promote_types(q_BSHK.dtype, torch.float32)
    at = positions(length, queries, q_BSHK.device, wide)
    scale = q_BSHK.shape[-1] ** -0.5 if scale is None else scale
    q_BRGNK = torch.unflatten(torch.index_select(q_BSHK, 1, at.rows_R), 2, (groups, -1))
    q_BGXK = q_BRGNK.permute(0, 2, 3, 1, 4).flatten(2, 3)  # X: N x R
    scores = q_BGXK @ k_BSGK.permute(0, 2, 3, 1)
    scores_BGNRS = torch.unflatten(scores.to(wide), 2, (-1, len(at.rows_R)))
    hidden_BGNRS = torch.add(at.mask_RS, scores_BGNRS, alpha=scale)
    entropy_BGNR = torch.special.entr(torch.softmax(hidden_BGNRS, -1)).sum(-1)
    return hidden_BGNRS.amax(), entropy_BGNR.mean(), (entropy_BGNR @ at.share_R).mean()


class Positions(NamedTuple):
    """Which queries of a sequence are read, and what follows from where they are."""

    rows_R: torch.Tensor
    mask_RS: torch.Tensor
    """0, and minus infinity at the tokens after a query."""
    share_R: torch.Tensor
    """What makes of their entropies the mean share of what is possible: of attending to all tokens alike."""


@lru_cache(maxsize=16)
def positions(length: int, queries: int, device: torch.device, dtype: torch.dtype) -> Positions:
    """Return the positions of at most ``queries`` queries [R], spread evenly, the last one among them.

    >>> [positions(n, 3, torch.device("cpu"), torch.float32).rows_R.tolist() for n in (8, 2)]
    [[1, 4, 7], [0, 1]]
    """
    count = min(queries, length)
    rows_R = torch.tensor([length * (n + 1) // count - 1 for n in range(count)])
    later_RS = torch.arange(length) > rows_R[:, None]
    mask_RS = torch.zeros(count, length, dtype=dtype).masked_fill_(later_RS, -torch.inf)
    several_R = rows_R > 0  # the first token attends to itself alone: nothing else is possible
    possible_R = (rows_R + 1).to(dtype).log().masked_fill(~several_R, 1.0)
    share_R = several_R / possible_R / several_R.sum().clamp(min=1)
    return Positions(*(each.to(device, non_blocking=True) for each in (rows_R, mask_RS, share_R)))
