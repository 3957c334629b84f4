"""Moving averages of weights."""

from __future__ import annotations

import torch
from torch.optim.sgd import sgd


def move_averages(
    averages: list[torch.Tensor], weights: list[torch.Tensor], share: float, found_inf: torch.Tensor | None
) -> None:
    """Move averages towards the weights by a share of the difference, in few kernels.

    They stay as they are if ``found_inf``, a float32 scalar on the device, is 1.
    """
    if found_inf is None:
        torch._foreach_lerp_(averages, weights, share)
        return
    # No such kernel has a share on the device, but fused SGD can skip. Its gradient here is that of
    # |average - weight|^2 / 2: the weight, maximized, with a weight decay of 1.
    options = {"weight_decay": 1.0, "maximize": True, "momentum": 0.0, "dampening": 0.0, "nesterov": False}
    state = [None] * len(averages)
    sgd(averages, weights, state, fused=True, found_inf=found_inf, lr=share, **options)  # type: ignore[arg-type]
