"""AdamW with low-precision moments: one kernel reads, updates and writes a weight and both of its moments.

Plain PyTorch dequantizes moments to float32, updates, and quantizes them, in about 50 passes over memory
for moments in eight bits. On a GPU, and in Triton's interpreter, nothing of this is stored here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nanotrain_cuda.permutation import in_triton

Tensor = torch.Tensor
State = Mapping[str, Tensor]


def low_precision_adamw(
    weights: Sequence[Tensor], states: Sequence[State], group: Mapping[str, Any], found_inf: Tensor | None
) -> list[Tensor]:
    """Update what the kernel takes. See :meth:`nanotrain_core.api.torch.Kernels.low_precision_adamw`."""
    taken, others = list[tuple[Tensor, Tensor, State]](), list[Tensor]()
    for weight, state in zip(weights, states, strict=True):
        gradient = weight.grad
        if gradient is not None and takes(weight, gradient, *state.values()):
            taken.append((weight, gradient, state))
        else:
            others.append(weight)
    if taken:
        update(taken, group, found_inf)
    return others


def takes(weight: Tensor, gradient: Tensor, *state: Tensor) -> bool:
    """Return whether the kernel can update a weight with this gradient and state."""
    contiguous = all(each.is_contiguous() for each in (weight, gradient, *state))
    return in_triton(weight) and contiguous and weight.dtype == gradient.dtype == torch.float32


def update(
    taken: Sequence[tuple[Tensor, Tensor, State]], group: Mapping[str, Any], found_inf: Tensor | None
) -> None:
    """Take a step on weights, each with its gradient and state."""
    from nanotrain_cuda.triton_adamw import update_weight

    steps = [state["step"] for _, _, state in taken]
    torch._foreach_add_(steps, 1)
    if found_inf is not None:
        torch._foreach_sub_(steps, [found_inf] * len(steps))
    (beta1, beta2), lr = group["betas"], group["lr"]
    numbers = torch.stack(steps).double()  # powers in float32 would cost the corrections half their digits
    step_sizes, factors = lr / (1 - beta1**numbers), (1 - beta2**numbers).rsqrt()
    corrections_N2 = torch.stack((step_sizes, factors), dim=1).float()
    options = (beta1, beta2, lr * group["weight_decay"], group["eps"])
    for (weight, gradient, state), corrections in zip(taken, corrections_N2.unbind(), strict=True):
        update_weight(weight, gradient, state, corrections, found_inf, *options)
