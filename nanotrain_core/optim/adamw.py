"""The component ``adamw``: torch's fused AdamW on masters, or AdamW with low-precision moments."""

from __future__ import annotations

from typing import Any

import torch

from nanotrain_core.builtin.configs import AdamWConfig
from nanotrain_core.layout.placement import Piece
from nanotrain_core.optim import moments
from nanotrain_core.optim.fused_adamw import FusedAdamW
from nanotrain_core.optim.master_optimizer import MasterOptimizer
from nanotrain_core.optim.master_shards import MasterShard


class AdamW(MasterOptimizer):
    """Adam with decoupled weight decay, torch's fused kernel on every device.

    Source: Loshchilov and Hutter, arXiv 1711.05101, algorithm 2.
    """

    config: AdamWConfig
    momentum = "exp_avg"

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Return ``torch.optim.AdamW``, or a variant with low-precision moments."""
        config = self.config
        if config.moment_dtype == "float32":
            return FusedAdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
        options = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
        return moments.LowPrecisionAdamW(groups, kernels=self.kernels, **options)

    def state_of(self, shard: MasterShard) -> dict[str, torch.Tensor]:
        """Return both moments at zero, in their storage format."""
        weight, carries = shard.weight, shard.feedback is not None
        kept = moments.initial_moments(weight, shard.piece, self.config.moment_dtype, carries=carries)
        return {"step": torch.zeros((), dtype=torch.float32, device=weight.device), **kept}

    @property
    def skips_on_device(self) -> bool:
        """Both AdamWs support ``found_inf``, with moments of any dtype."""
        return True

    def place(self, name: str, shard: MasterShard) -> Piece:
        """Scales are placed as tensors of their own shape."""
        return moments.grouped(shard.piece) if name.endswith(moments.SCALE) else shard.piece

    @property
    def carries(self) -> bool:
        """Whether there is a first moment."""
        return self.config.betas[0] > 0

    def carry(self, shard: MasterShard, error: torch.Tensor) -> None:
        """Add ((1 - beta1^t) / lr) (1 - 1 / beta1) (sqrt(v / (1 - beta2^t)) + eps) error to the first moment.

        Called after the t-th step. Later steps apply beta1 + beta1^2 + ... of it: -lr times that is the
        error. Source: Nikdan et al., "ECO", arXiv 2601.22101, the form for Adam.
        """
        state, (beta1, beta2) = self.inner.state[shard.weight], shard.group["betas"]
        first, second = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
        scale = (moments.load(state, "exp_avg_sq", error.dtype) / second).sqrt_().add_(shard.group["eps"])
        state["exp_avg"].add_(scale.mul_(error).mul_(first * ((1 - 1 / beta1) / shard.group["lr"])))
