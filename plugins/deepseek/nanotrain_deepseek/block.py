"""One layer: latent attention, then a feed-forward layer or experts, each adding to the residual stream.

Shapes: B batch, S sequence, D width, E experts.
"""

from __future__ import annotations

import torch
from torch import nn

from nanotrain_core.api import Role, tag
from nanotrain_core.api.models import RoutingStatistics
from nanotrain_core.api.torch import LayerCache, Ops, RMSNorm, Rotation, SwiGLU
from nanotrain_deepseek.config import DeepSeekConfig
from nanotrain_deepseek.mla import LatentAttention
from nanotrain_deepseek.moe import MixtureOfExperts


class Block(nn.Module):
    """One layer: a dense block has ``ffn``, one with experts ``moe``."""

    def __init__(self, config: DeepSeekConfig, ops: Ops, *, dense: bool) -> None:
        super().__init__()
        self.dense = dense
        self.attn_norm = norm(config, ops)
        self.attn = LatentAttention(config, ops)
        self.ffn_norm = norm(config, ops)
        if dense:
            self.ffn = SwiGLU(config.width, config.ffn, ops)
        else:
            self.moe = MixtureOfExperts(config, ops)
        tag(self, Role.BLOCK)

    def forward(
        self,
        x_BSD: torch.Tensor,
        cos_sin: Rotation,
        cache: LayerCache | None = None,
        starts_BS: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, RoutingStatistics | None]:
        x_BSD = x_BSD + self.attn(self.attn_norm(x_BSD), cos_sin, cache, starts_BS)
        h_BSD = self.ffn_norm(x_BSD)
        if self.dense:
            return x_BSD + self.ffn(h_BSD), None
        y_BSD, routing = self.moe(h_BSD)
        return x_BSD + y_BSD, RoutingStatistics(dict(routing.losses), routing.load)


def norm(config: DeepSeekConfig, ops: Ops) -> nn.Module:
    """Return a normalization over the hidden dimension."""
    return tag(RMSNorm(config.width, eps=config.norm_eps, ops=ops), Role.NORM)
