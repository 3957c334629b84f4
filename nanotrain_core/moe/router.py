"""The router of most models: softmax scores of all experts, the best K of each token, their weights.

Shapes: B batch, S sequence, D width, E experts, K chosen per token.

Sources: Jiang et al., arXiv 2401.04088, section 2.1 (Mixtral: a softmax over the chosen logits is the
softmax over all, divided by the sum of the chosen); Yang et al., arXiv 2505.09388 (Qwen3).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from nanotrain_core.moe.routing import CountingRouter, Routing, tokens_per_expert

#: Prevents division by 0 when all chosen scores underflow.
TINY = 1e-20


class TopKRouter(CountingRouter):
    """Scores in float32 or wider, the best K experts, and a count of each expert's tokens.

    A subclass overrides what differs: ``score``, ``best``, and ``losses`` for its balance losses.
    """

    load: torch.Tensor | None
    """Tokens of each expert [E] in the last step, over the whole batch: what a loss of the global batch
    counts. None unless asked for; ones before the first step, which is even load."""

    def __init__(
        self,
        width: int,
        experts: int,
        top_k: int,
        *,
        normalize: bool,
        scale: float = 1.0,
        keeps_load: bool = False,
    ) -> None:
        super().__init__(experts)
        self.top_k, self.normalize, self.scale = top_k, normalize, scale
        self.weight = nn.Parameter(torch.empty(experts, width))
        self.register_buffer("load", torch.ones(experts, dtype=torch.int64) if keeps_load else None)

    def forward(self, x_BSD: torch.Tensor) -> Routing:
        """Return experts and weights of every token, and with :meth:`train` losses and load."""
        wide = torch.promote_types(x_BSD.dtype, torch.float32)
        scores_BSE = self.score(F.linear(x_BSD.to(wide), self.weight.to(wide)))
        experts_BSK = self.best(scores_BSE)
        weights_BSK = scores_BSE.gather(-1, experts_BSK)
        if self.normalize:
            weights_BSK = weights_BSK / (weights_BSK.sum(-1, keepdim=True) + TINY)
        weights_BSK = weights_BSK * self.scale
        if not self.training:
            return Routing(experts_BSK, weights_BSK)
        losses, load = self.losses(scores_BSE, experts_BSK), tokens_per_expert(experts_BSK, self.experts)
        return Routing(experts_BSK, weights_BSK, losses, load)

    def score(self, logits_BSE: torch.Tensor) -> torch.Tensor:
        """Return the scores [B, S, E], which are the weights of the chosen experts too."""
        return logits_BSE.softmax(-1)

    def best(self, scores_BSE: torch.Tensor) -> torch.Tensor:
        """Return each token's experts [B, S, K]."""
        return self.choose(scores_BSE, None, self.top_k)

    def losses(self, scores_BSE: torch.Tensor, experts_BSK: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return balance losses by name, each a sum over sequences."""
        return {}

    def balance(self, load: torch.Tensor) -> None:
        """Keep the global ``load`` [E] of a step for the losses of the next."""
        if self.load is not None:
            self.load.copy_(load)
