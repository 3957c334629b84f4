"""The component ``muon``, and the torch optimizer that applies its updates.

The momentum of a matrix is state of its elements, so it is sharded and saved like any other. In each step it
is added to the gradient, :mod:`.exchange` makes matrices of that whole, and what comes back is the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from nanotrain_core.api import Role, lies_in
from nanotrain_core.api.torch import (
    GradientSync,
    MasterOptimizer,
    MasterShard,
    Mesh,
    PlacedParameter,
    Placement,
    Precision,
)
from nanotrain_muon import MuonConfig
from nanotrain_muon.assumed import OtherRanks
from nanotrain_muon.exchange import Orthogonalizer

#: Linear maps of the hidden dimension. What has no role is no matrix that a model declared.
LINEAR = (Role.COLUMN, Role.ROW, Role.REPLICATED)


class Muon(MasterOptimizer):
    """Orthogonalized momentum of matrices, AdamW for everything else."""

    config: MuonConfig

    def is_matrix(self, placement: Placement) -> bool:
        """Return whether Muon updates a parameter: a linear layer's weight, or those of stacked experts."""
        if any(lies_in(placement.name, pattern) for pattern in self.config.adamw_names):
            return False
        if placement.role is Role.EXPERTS:
            return len(placement.global_shape) == 3
        return placement.role in LINEAR and len(placement.global_shape) == 2

    def options(self, shard: MasterShard) -> dict[str, Any]:
        """Return the update of a parameter by its role, and weight decay of tensors that are no vectors."""
        config, muon = self.config, self.is_matrix(shard.placement)
        vector = len(shard.placement.global_shape) < 2
        return {
            "muon": muon,
            "lr": config.lr if muon else config.lr * config.adamw_lr_ratio,
            "weight_decay": 0.0 if vector else config.weight_decay,
        }

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Return the optimizer that applies updates of matrices and computes those of AdamW."""
        config = self.config
        return AppliesUpdates(groups, lr=config.lr, betas=config.adamw_betas, eps=config.adamw_eps)

    def state_of(self, shard: MasterShard) -> dict[str, torch.Tensor]:
        """Return a momentum, or both moments, at zero."""
        weight = shard.weight
        if shard.group["muon"]:
            return {"momentum": torch.zeros_like(weight)} if self.config.momentum else {}
        moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.zeros((), dtype=torch.float32, device=weight.device), **moments}

    @property
    def skips_on_device(self) -> bool:
        """Torch's fused kernels support ``found_inf``."""
        return True

    def setup(
        self,
        parameters: Sequence[PlacedParameter],
        precision: Precision,
        gradients: GradientSync,
        mesh: Mesh,
    ) -> None:
        """Allocate state, and divide the matrices among the ranks that hold them. Collective.

        Raises:
            NanotrainError: see :class:`Orthogonalizer`.
        """
        super().setup(parameters, precision, gradients, mesh)
        self.numbers = [number for number, shard in enumerate(self.master_shards) if shard.group["muon"]]
        """Indices of matrices among the shards."""
        matrices = [self.master_shards[number] for number in self.numbers]
        states = [self.inner.state[shard.weight] for shard in matrices]
        self.momenta = [state["momentum"] for state in states if "momentum" in state]
        blocks = (placed.placement for placed in parameters if placed.parameter.requires_grad)
        others = None
        if mesh.device.type == "meta":  # a dry run: nobody can be asked
            held = [block for block in blocks if self.is_matrix(block)]
            others = OtherRanks(held, gradients, mesh.layout, mesh.rank)
        self.orthogonalizer = Orthogonalizer(
            [shard.piece for shard in matrices],
            [shard.weight.dtype for shard in matrices],
            mesh,
            self.config,
            others,
        )

    def precondition_unless(self, found_inf: torch.Tensor | None, gradients: list[torch.Tensor]) -> None:
        """Replace gradients of matrices by their updates; a rank without any takes part."""
        config = self.config
        for number in self.numbers:
            gradients[number] = gradients[number].to(self.master_shards[number].weight.dtype)
        own = [gradients[number] for number in self.numbers]
        if self.momenta:
            # The kernel sets B to momentum x B + g and p to p - lr x B, unless found_inf is 1. If p is the
            # gradient itself, it becomes g + momentum x B.
            nesterov_lr = -config.momentum if config.nesterov else 0.0
            fused_sgd(own, own, self.momenta, lr=nesterov_lr, momentum=config.momentum, found_inf=found_inf)
            if not config.nesterov:
                torch._foreach_copy_(own, self.momenta)
        self.orthogonalizer(own)


class AppliesUpdates(torch.optim.Optimizer):
    """Moves matrices by the updates they are given, and all else by AdamW, with torch's fused kernels."""

    found_inf: torch.Tensor | None = None
    """A float32 scalar on the device, 1 if the step must change nothing, as in torch's own."""

    def __init__(
        self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "muon": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every weight. No closure is called."""
        for group in self.param_groups:
            weights = group["params"]
            gradients = [weight.grad for weight in weights]
            if not weights:
                continue
            lr, decay, found_inf = group["lr"], group["weight_decay"], self.found_inf
            if group["muon"]:  # without momentum, its decay is decoupled
                fused_sgd(weights, gradients, [], lr=lr, weight_decay=decay, found_inf=found_inf)
                continue
            first, second, steps = (
                [self.state[weight][name] for weight in weights] for name in ("exp_avg", "exp_avg_sq", "step")
            )
            adamw(
                weights,
                gradients,
                first,
                second,
                [],
                steps,
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=lr,
                weight_decay=decay,
                eps=group["eps"],
                maximize=False,
                found_inf=found_inf,
            )


def fused_sgd(
    weights: list[torch.Tensor],
    gradients: list[torch.Tensor],
    momenta: list[torch.Tensor],
    *,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    found_inf: torch.Tensor | None,
) -> None:
    """Call torch's fused kernel: nothing changes if ``found_inf`` is 1."""
    sgd(
        weights,
        gradients,
        list(momenta) or [None] * len(weights),
        fused=True,
        found_inf=found_inf,
        weight_decay=weight_decay,
        momentum=momentum,
        lr=lr,
        dampening=0.0,
        nesterov=False,
        maximize=False,
    )
