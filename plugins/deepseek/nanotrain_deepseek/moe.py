"""A layer of experts: some chosen for each token, some shared by all.

Shapes: B batch, S sequence, D width.

Source: DeepSeekMoE as in DeepSeek-V3, arXiv 2412.19437, section 2.1.2, equation 12.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import attrs
import torch
from torch import nn

from nanotrain_core.layout.roles import Role, tag
from nanotrain_deepseek.config import DeepSeekConfig
from nanotrain_deepseek.experts import Experts
from nanotrain_deepseek.ffn import SwiGLU
from nanotrain_deepseek.router import Router


class Tally:
    """Balance losses of one forward pass of a part, layer by layer.

    It is closed when the pass is over. A layer that is run again for its backward pass, to save memory,
    meets a closed tally: its losses and its tokens have been counted.
    """

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self.open = True

    def add(self, losses: Mapping[str, torch.Tensor]) -> None:
        """Add a layer's losses."""
        if self.open:
            for name, value in losses.items():
                self.sums[name] = self.sums[name] + value if name in self.sums else value

    def close(self) -> dict[str, torch.Tensor]:
        """Return the sums; nothing is added from now on."""
        self.open = False
        return self.sums


class MixtureOfExperts(nn.Module):
    """Route, run the chosen experts, add the shared ones."""

    def __init__(self, config: DeepSeekConfig) -> None:
        super().__init__()
        self.router = tag(Router(config), Role.ROUTER)
        self.experts = Experts(config)
        if config.shared_experts:
            self.shared = SwiGLU(config.width, config.shared_experts * config.expert_ffn)

    def forward(self, x_BSD: torch.Tensor, tally: Tally) -> torch.Tensor:
        self.router.counting = tally.open
        routing = self.router(x_BSD)
        tally.add(routing.losses)
        shared = cache(lambda: self.shared(x_BSD)) if hasattr(self, "shared") else None
        y_BSD: torch.Tensor = self.experts(x_BSD, attrs.evolve(routing, meanwhile=shared))
        return y_BSD if shared is None else y_BSD + shared()
