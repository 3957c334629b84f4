"""Multi-token prediction: in training, each position also predicts tokens beyond the next.

Module k takes the output of module k - 1 (the model's, for k = 1) at position i, and the embedding of token
i + k, and predicts token i + k + 1. Its input never contains a token that it must predict. An output is what
the head multiplies (h in equation 23): the one after the norm, as in Megatron-LM and transformers.

Shapes: B batch, S sequence, D width.

Source: DeepSeek-V3, arXiv 2412.19437, section 2.2, equations 21 to 25.
"""

from __future__ import annotations

import torch
from torch import nn

from nanotrain_core.api import Role, tag
from nanotrain_core.api.models import RoutingStatistics
from nanotrain_core.api.torch import Ops, Rotation
from nanotrain_deepseek.block import Block, norm
from nanotrain_deepseek.config import DeepSeekConfig


class Predictor(nn.Module):
    """One module: concatenation, one more block with experts, and a norm before the model's head."""

    def __init__(self, config: DeepSeekConfig, ops: Ops) -> None:
        super().__init__()
        self.hidden_first = config.mtp_input == "hidden_first"
        self.hidden_norm = norm(config, ops)
        self.embed_norm = norm(config, ops)
        self.proj = tag(nn.Linear(2 * config.width, config.width, bias=False), Role.REPLICATED)
        self.block = Block(config, ops, dense=False)
        self.norm = norm(config, ops)

    def forward(
        self,
        h_BSD: torch.Tensor,
        embedded_BSD: torch.Tensor,
        turn: Rotation,
        starts_BS: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, RoutingStatistics | None]:
        """Return normalized hidden states [B, S, D], for the model's head and the next module."""
        pair = [self.hidden_norm(h_BSD), self.embed_norm(embedded_BSD)]
        joined = self.proj(torch.cat(pair if self.hidden_first else pair[::-1], dim=-1))
        out_BSD, routed = self.block(joined, turn, None, starts_BS)
        return self.norm(out_BSD), routed
