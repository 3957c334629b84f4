"""``torch.optim.AdamW`` with its fused kernel, on lists that are reused from step to step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.optim.adamw import adamw

Tensors = list[torch.Tensor]


@attrs.define(frozen=True, eq=False)
class Lists:
    """The kernel's inputs for one parameter group, except gradients."""

    weights: Tensors
    """``group["params"]`` itself."""
    first: Tensors
    second: Tensors
    steps: Tensors


class FusedAdamW(torch.optim.AdamW):
    """Caches the lists of tensors that the fused kernel takes, instead of building them in every step.

    Requires a gradient for every weight, and state tensors that are never replaced.
    """

    found_inf: torch.Tensor | None = None
    """A float32 scalar on the device, 1 if the step must change nothing, as in torch's own."""

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        super().__init__(groups, fused=True, **options)
        self._lists: dict[int, Lists] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Rebuild the lists."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._lists = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every weight. No closure is called."""
        for number, group in enumerate(self.param_groups):
            known = self._lists.get(number)
            if known is None or known.weights is not group["params"]:
                known = self._lists[number] = self._gathered(group["params"])
            gradients = [weight.grad for weight in known.weights]
            lists = (known.weights, gradients, known.first, known.second, known.steps)
            fused_adamw(*lists, group, self.found_inf)

    def _gathered(self, weights: Tensors) -> Lists:
        lists = ([self.state[w][name] for w in weights] for name in ("exp_avg", "exp_avg_sq", "step"))
        return Lists(weights, *lists)


def fused_adamw(
    weights: Tensors,
    gradients: Sequence[torch.Tensor | None],
    first: Tensors,
    second: Tensors,
    steps: Tensors,
    group: Mapping[str, Any],
    found_inf: torch.Tensor | None,
) -> None:
    """Update weights, moments and step counters in place, with the options of an ``AdamW`` group.

    Nothing changes if ``found_inf``, a float32 scalar on the device, is 1.
    """
    adamw(
        weights,
        gradients,  # type: ignore[arg-type]
        first,
        second,
        [],
        steps,
        fused=True,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
        found_inf=found_inf,
    )
