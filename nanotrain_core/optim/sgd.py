"""The component ``sgd``: torch's SGD on masters."""

from __future__ import annotations

from typing import Any

import torch

from nanotrain_core.builtin.configs import SGDConfig
from nanotrain_core.optim.master_optimizer import MasterOptimizer
from nanotrain_core.optim.master_shards import MasterShard


class SGD(MasterOptimizer):
    """Gradient descent, with optional heavy-ball momentum."""

    config: SGDConfig
    momentum = "momentum_buffer"

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Return ``torch.optim.SGD``, fused where a step may be skipped on the device."""
        fused = self.mesh.device_is_async
        return torch.optim.SGD(groups, lr=self.config.lr, momentum=self.config.momentum, fused=fused)

    @property
    def skips_on_device(self) -> bool:
        """Whether a step can be skipped without the host: the fused kernel can."""
        return bool(self.inner.defaults["fused"])

    def initial_state(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the velocity at zero; torch initializes it to the first gradient, with the same result."""
        return {"momentum_buffer": torch.zeros_like(weight)} if self.config.momentum else {}

    @property
    def carries(self) -> bool:
        """Whether there is a velocity."""
        return self.config.momentum > 0

    def carry(self, shard: MasterShard, error: torch.Tensor) -> None:
        """Add (1 / lr) (1 - 1 / momentum) error to the velocity. Source: arXiv 2601.22101, for SGDM."""
        velocity = self.inner.state[shard.weight]["momentum_buffer"]
        velocity.add_(error, alpha=(1 - 1 / self.config.momentum) / shard.group["lr"])
