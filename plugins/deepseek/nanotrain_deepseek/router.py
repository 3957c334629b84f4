"""Routers: V3's sigmoid scores with a load-balancing bias, and V2's softmax.

Shapes: B batch, S sequence, D width, E experts, K chosen per token, G groups of consecutive experts.

Sources: DeepSeek-V3, arXiv 2412.19437, section 2.1.2, equations 12 to 20; DeepSeek-V2, arXiv 2405.04434,
section 2.2.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from nanotrain_core.api.torch import CountingRouter, Routing, count_of, keep_dtype
from nanotrain_deepseek import balance_losses
from nanotrain_deepseek.config import DeepSeekConfig

#: Prevents division by 0 when all sigmoids underflow.
TINY = 1e-20


class Router(CountingRouter):
    """Linear scores, the best K of the best groups, and a count of each expert's tokens."""

    bias: nn.Parameter | None

    def __init__(self, config: DeepSeekConfig) -> None:
        super().__init__(config.experts)
        self.config, self.bias_update_rate = config, config.bias_update_rate
        self.weight = nn.Parameter(torch.empty(config.experts, config.width))
        bias = None
        if config.score == "sigmoid":
            bias = nn.Parameter(torch.empty(config.experts, dtype=torch.float32), requires_grad=False)
        self.register_parameter("bias", bias)
        keep_dtype(self, "bias")

    def forward(self, x_BSD: torch.Tensor) -> Routing:
        """Return experts and weights of every token, and with :meth:`train` the balance losses."""
        c, wide = self.config, torch.promote_types(x_BSD.dtype, torch.float32)
        logits_BSE = F.linear(x_BSD.to(wide), self.weight.to(wide))
        scores_BSE = logits_BSE.sigmoid() if c.score == "sigmoid" else logits_BSE.softmax(-1)
        # The bias affects which experts are chosen but never their weights.
        experts_BSK = self.choose(scores_BSE, self.bias, c.top_k, c.groups, c.chosen_groups)
        weights_BSK = scores_BSE.gather(-1, experts_BSK)
        if c.normalize_weights:
            weights_BSK = weights_BSK / (weights_BSK.sum(-1, keepdim=True) + TINY)
        if not self.training:
            return Routing(experts_BSK, weights_BSK * c.route_scale)
        losses, load = self._losses(scores_BSE, experts_BSK), count_of(experts_BSK, c.experts)
        return Routing(experts_BSK, weights_BSK * c.route_scale, losses, load)

    def _losses(self, scores_BSE: torch.Tensor, experts_BSK: torch.Tensor) -> dict[str, torch.Tensor]:
        c, losses = self.config, {}
        if c.seq_balance:
            best_BSK = self.choose(scores_BSE, None, c.top_k)
            losses["seq_balance"] = balance_losses.sequence_loss(scores_BSE, best_BSK)
        if c.expert_balance:
            losses["expert_balance"] = balance_losses.expert_loss(scores_BSE, experts_BSK)
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
