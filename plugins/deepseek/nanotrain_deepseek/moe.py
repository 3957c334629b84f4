"""A layer of experts: some chosen for each token, some shared by all.

Shapes: B batch, S sequence, D width.

Source: DeepSeekMoE as in DeepSeek-V3, arXiv 2412.19437, section 2.1.2, equation 12.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from nanotrain_core.api import Role, tag
from nanotrain_core.api.models import CallOnce, Experts
from nanotrain_core.api.torch import Ops, Routing, SwiGLU
from nanotrain_deepseek.config import DeepSeekConfig
from nanotrain_deepseek.router import Router


class MixtureOfExperts(nn.Module):
    """Route, run the chosen experts, add the shared ones."""

    def __init__(self, config: DeepSeekConfig, ops: Ops) -> None:
        super().__init__()
        self.router = tag(Router(config), Role.ROUTER)
        self.experts = Experts(config.experts, config.width, config.expert_ffn, ops)
        self.shared = None
        if config.shared_experts:
            self.shared = SwiGLU(config.width, config.shared_experts * config.expert_ffn, ops)

    def forward(self, x_BSD: torch.Tensor) -> tuple[torch.Tensor, Routing]:
        """Return the sum, and what the router decided."""
        routing = self.router(x_BSD)
        if self.shared is None:
            return self.experts(x_BSD, routing), routing
        shared = CallOnce(self.shared, x_BSD)
        y_BSD = self.experts(x_BSD, replace(routing, meanwhile=shared))
        return y_BSD + shared(), routing
