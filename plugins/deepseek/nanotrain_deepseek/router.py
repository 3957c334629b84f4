"""Routers: V3's sigmoid scores with a load-balancing bias, and V2's softmax.

Shapes: B batch, S sequence, D width, E experts, K chosen per token, G groups of consecutive experts.

Sources: DeepSeek-V3, arXiv 2412.19437, section 2.1.2, equations 12 to 20; DeepSeek-V2, arXiv 2405.04434,
section 2.2.
"""

from __future__ import annotations

import torch
from torch import nn

from nanotrain_core.api.models import TopKRouter, load_balancing_loss
from nanotrain_core.api.torch import keep_dtype
from nanotrain_deepseek import balance_losses
from nanotrain_deepseek.config import DeepSeekConfig


class Router(TopKRouter):
    """Linear scores, the best K of the best groups, and a count of each expert's tokens."""

    bias: nn.Parameter | None

    def __init__(self, config: DeepSeekConfig) -> None:
        normalize, scale = config.normalize_weights, config.route_scale
        super().__init__(config.width, config.experts, config.top_k, normalize=normalize, scale=scale)
        self.config, self.bias_update_rate = config, config.bias_update_rate
        bias = None
        if config.score == "sigmoid":
            bias = nn.Parameter(torch.empty(config.experts, dtype=torch.float32), requires_grad=False)
        self.register_parameter("bias", bias)
        keep_dtype(self, "bias")

    def score(self, logits_BSE: torch.Tensor) -> torch.Tensor:
        """Return the scores [B, S, E]."""
        return logits_BSE.sigmoid() if self.config.score == "sigmoid" else super().score(logits_BSE)

    def best(self, scores_BSE: torch.Tensor) -> torch.Tensor:
        """Return each token's experts. The bias affects which are chosen but never their weights."""
        c = self.config
        return self.choose(scores_BSE, self.bias, c.top_k, c.groups, c.chosen_groups)

    def losses(self, scores_BSE: torch.Tensor, experts_BSK: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the balance losses that have a weight."""
        c, losses = self.config, {}
        if c.seq_balance:
            best_BSK = self.choose(scores_BSE, None, c.top_k)
            losses["seq_balance"] = balance_losses.sequence_loss(scores_BSE, best_BSK)
        if c.expert_balance:
            losses["expert_balance"] = load_balancing_loss(scores_BSE, experts_BSK)
        if c.device_balance:
            losses["device_balance"] = balance_losses.device_loss(scores_BSE, experts_BSK, c.groups)
        if c.comm_balance:
            losses["comm_balance"] = balance_losses.communication_loss(
                scores_BSE, experts_BSK, c.groups, c.chosen_groups
            )
        return losses

    # --- load ---------------------------------------------------------------------------------

    @torch.no_grad()
    def balance(self, load: torch.Tensor) -> None:
        """Decrease the bias of experts above the mean of the global ``load`` [E], increase it below the mean.

        Source: DeepSeek-V3, section 2.1.2, auxiliary-loss-free load balancing.
        """
        if self.bias is None or not self.bias_update_rate:
            return
        missing = load.sum() - load * len(load)  # E times (mean - load): exact in integers
        self.bias.add_(missing.sign().to(self.bias.dtype), alpha=self.bias_update_rate)
