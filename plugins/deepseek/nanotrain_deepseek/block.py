"""One layer: latent attention, then a feed-forward layer or experts, each adding to the residual stream.

Shapes: B batch, S sequence, D width.
"""

from __future__ import annotations

import torch
from torch import nn

from nanotrain_core.layout.roles import Role, tag
from nanotrain_core.models.rms_norm import RMSNorm
from nanotrain_core.models.rope import Rotation
from nanotrain_deepseek.config import DeepSeekConfig
from nanotrain_deepseek.ffn import SwiGLU
from nanotrain_deepseek.mla import LatentAttention
from nanotrain_deepseek.moe import MixtureOfExperts, Tally


class Block(nn.Module):
    """A dense block has ``ffn``, one with experts ``moe``."""

    def __init__(self, config: DeepSeekConfig, *, dense: bool) -> None:
        super().__init__()
        self.dense = dense
        self.attn_norm = norm(config)
        self.attn = LatentAttention(config)
        self.ffn_norm = norm(config)
        if dense:
            self.ffn = SwiGLU(config.width, config.ffn)
        else:
            self.moe = MixtureOfExperts(config)
        tag(self, Role.BLOCK)

    def forward(self, x_BSD: torch.Tensor, turn: Rotation, tally: Tally) -> torch.Tensor:
        x_BSD = x_BSD + self.attn(self.attn_norm(x_BSD), turn)
        h_BSD = self.ffn_norm(x_BSD)
        y_BSD: torch.Tensor = self.ffn(h_BSD) if self.dense else self.moe(h_BSD, tally)
        return x_BSD + y_BSD


def norm(config: DeepSeekConfig) -> nn.Module:
    """Return a normalisation over the width."""
    return tag(RMSNorm(config.width, eps=config.norm_eps), Role.NORM)
