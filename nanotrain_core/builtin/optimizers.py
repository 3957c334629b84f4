"""AdamW and SGD on master weights of whatever this rank updates: parameters, or ranges of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from nanotrain_core.builtin.configs import AdamWConfig, SGDConfig
from nanotrain_core.contracts import Block, GradientSync, MasterWeight, Precision, StepStats
from nanotrain_core.mesh import Mesh
from nanotrain_core.placement import Piece, PlacedParameter, global_norm


class Slot:
    """One piece as an optimizer sees it: its master, and the tensor that torch updates."""

    def __init__(self, piece: Piece, master: MasterWeight) -> None:
        self.piece, self.master = piece, master
        self.parameter, self.placement = piece.parameter, piece.placement
        self.weight = torch.nn.Parameter(master.load().detach(), requires_grad=False)


class MasterOptimizer:
    """Steps a ``torch.optim`` optimizer on the masters; subclasses say which, and its state.

    See :class:`~nanotrain_core.contracts.Optimizer`.
    """

    inner: torch.optim.Optimizer

    def __init__(self, config: Any) -> None:
        self.config = config

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Return the torch optimizer for two parameter groups, decayed and not."""
        raise NotImplementedError

    def initial_state(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the state torch would create for ``weight`` at the first step."""
        raise NotImplementedError

    def setup(
        self,
        parameters: Sequence[PlacedParameter],
        precision: Precision,
        gradients: GradientSync,
        mesh: Mesh,
    ) -> None:
        """Make masters and allocate state."""
        self.gradients, self.mesh = gradients, mesh
        self.slots = [Slot(piece, self.master(piece, precision)) for piece in gradients.pieces()]
        decayed = [s.weight for s in self.slots if len(s.placement.global_shape) > 1]
        others = [s.weight for s in self.slots if len(s.placement.global_shape) <= 1]
        decay = self.config.weight_decay
        groups = [{"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
        self.inner = self.make([group for group in groups if group["params"]] or groups)
        for slot in self.slots:
            self.inner.state[slot.weight] = self.initial_state(slot.weight)

    def master(self, piece: Piece, precision: Precision) -> MasterWeight:
        """Return the master of one piece."""
        return precision.master(piece.weight, piece.name)

    @torch.no_grad()
    def step(self, *, loss_scale: float = 1.0) -> StepStats:
        """Unscale, clip, update, write the new weights through to the model."""
        gradients = [self.gradients.gradient_of(slot.piece) for slot in self.slots]
        placed = zip(gradients, (slot.placement for slot in self.slots), strict=True)
        norm = global_norm(placed, self.mesh) / loss_scale
        if not torch.isfinite(norm):  # the one place of a step where the host waits for the device
            return StepStats(norm, skipped=True)
        self._rescale(gradients, norm, loss_scale)
        for slot, gradient in zip(self.slots, gradients, strict=True):
            slot.weight.grad = gradient.to(slot.weight.device)
        self.inner.step()
        for slot in self.slots:
            slot.weight.grad = None
            slot.master.store(slot.weight.detach())
        return StepStats(norm)

    def _rescale(self, gradients: list[torch.Tensor], norm: torch.Tensor, loss_scale: float) -> None:
        """Divide by the loss scale and clip in one pass, without waiting for the device."""
        limit = self.config.clip_norm
        if not limit and loss_scale == 1.0:
            return
        factor = (limit / (norm + 1e-6)).clamp(max=1.0) if limit else torch.ones_like(norm)
        torch._foreach_mul_(gradients, factor / loss_scale)

    def blocks(self) -> Iterable[Block]:
        """Yield masters and state, each named after its parameter. Ranges of one share its scalars."""
        seen: set[str] = set()
        for slot in self.slots:
            for name, tensor in {**slot.master.state(), **self.inner.state[slot.weight]}.items():
                scalar = f"{name}/{slot.placement.name}"
                if tensor.shape or scalar not in seen:
                    yield from Block.of_piece(name, tensor, slot.piece)
                if not tensor.shape:
                    seen.add(scalar)

    def meta(self) -> dict[str, Any]:
        """All state is in :meth:`blocks`."""
        return {}

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Give all ranges of a parameter the scalars that were read into the first."""
        first: dict[str, dict[str, torch.Tensor]] = {}
        for slot in self.slots:
            state = self.inner.state[slot.weight]
            scalars = {name: tensor for name, tensor in state.items() if not tensor.shape}
            for name, tensor in first.setdefault(slot.placement.name, scalars).items():
                state[name].copy_(tensor)


class AdamW(MasterOptimizer):
    """Adam with decoupled weight decay, torch's fused kernel on every device.

    Source: Loshchilov and Hutter, arXiv 1711.05101, algorithm 2.
    """

    config: AdamWConfig

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Return ``torch.optim.AdamW``."""
        config = self.config
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)

    def initial_state(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return two moments at zero."""
        return {
            "step": torch.zeros((), dtype=torch.float32, device=weight.device),
            "exp_avg": torch.zeros_like(weight),
            "exp_avg_sq": torch.zeros_like(weight),
        }


class SGD(MasterOptimizer):
    """Gradient descent, with heavy-ball momentum if asked."""

    config: SGDConfig

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Return ``torch.optim.SGD``."""
        return torch.optim.SGD(groups, lr=self.config.lr, momentum=self.config.momentum)

    def initial_state(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the velocity at zero; torch starts it at the first gradient, which is the same."""
        return {"momentum_buffer": torch.zeros_like(weight)} if self.config.momentum else {}
