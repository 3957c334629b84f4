"""AdamW whose moments are kept in bfloat16 between steps, as DeepSeek-V3 was trained.

Each range's moments are widened to the master's dtype, updated by the same kernel as always, and rounded
back, one range after the other: what is wide at any time is one range of one bucket.

A bfloat16 number changes by at least 2^-9 of itself or not at all. Each step moves the second moment by up to
1 - beta2 of itself, so beta2 should be 0.99 or less: at 0.999 it stands still where gradients are steady.

Source: DeepSeek-V3, arXiv 2412.19437, section 3.3.2, "low-precision optimizer states".
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.adamw import adamw


class NarrowMoments(torch.optim.AdamW):
    """``torch.optim.AdamW`` on state whose moments are narrower than the weight."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every weight that has a gradient. No closure is ever called."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, group)

    def _update(self, weight: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        first, second = (state[name].to(weight.dtype) for name in ("exp_avg", "exp_avg_sq"))
        adamw(
            [weight],
            [gradient],
            [first],
            [second],
            [],
            [state["step"]],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        state["exp_avg"].copy_(first)
        state["exp_avg_sq"].copy_(second)
