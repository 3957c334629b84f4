"""AdamW and SGD on master weights of whatever this rank updates: parameters, or ranges of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from nanotrain_core.builtin.configs import AdamWConfig, SGDConfig
from nanotrain_core.contracts import Block, GradientSync, MasterWeight, Optimizer, Precision, StepStats
from nanotrain_core.errors import NanotrainError
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import Piece, PlacedParameter
from nanotrain_core.optim import moments
from nanotrain_core.optim.fused_adamw import FusedAdamW
from nanotrain_core.optim.grad_norm import GlobalNorm, clip_factor
from nanotrain_core.optim.slots import PlainWeights, Slot, only, step_unless, waves


class MasterOptimizer(Optimizer):
    """Steps a ``torch.optim`` optimizer on the masters; subclasses say which, and its state.

    See :class:`~nanotrain_core.contracts.Optimizer`.
    """

    inner: torch.optim.Optimizer

    def __init__(self, config: Any) -> None:
        self.config = config

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Return the torch optimizer for two parameter groups.

        Matrices have the config's ``weight_decay``, if it has that key; all else has 0.
        """
        raise NotImplementedError(f"{type(self).__name__} has no make(groups)")

    def initial_state(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the state torch would create for ``weight`` at the first step."""
        raise NotImplementedError(f"{type(self).__name__} has no initial_state(weight)")

    def state_of(self, slot: Slot) -> dict[str, torch.Tensor]:
        """Return a slot's initial state, where that depends on more than the weight."""
        return self.initial_state(slot.weight)

    def place(self, name: str, slot: Slot) -> Piece:
        """Return where a tensor of a slot's state sits: where its weight does."""
        return slot.piece

    @property
    def carries(self) -> bool:
        """Whether :meth:`carry` works with this config."""
        return False

    def carry(self, slot: Slot, error: torch.Tensor) -> None:
        """Add to a slot's momentum what makes later steps move its weight by ``error``, at a rate above 0."""
        raise NotImplementedError(f"{type(self).__name__} carries errors and has no carry(slot, error)")

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
        decay = getattr(self.config, "weight_decay", 0.0)
        groups = [{"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
        self.inner = self.make([group for group in groups if group["params"]] or groups)
        group_of = {weight: group for group in self.inner.param_groups for weight in group["params"]}
        for slot in self.slots:
            slot.group = group_of[slot.weight]
            self.inner.state[slot.weight] = self.state_of(slot)
            if not slot.plain:
                slot.forget()
        self.plain = PlainWeights(self.slots)
        self.encoded = [slot for slot in self.slots if not slot.plain]
        self.norm = GlobalNorm([slot.placement for slot in self.slots], mesh)
        self._refuse_loss()

    def _refuse_loss(self) -> None:
        """Refuse masters whose error nobody would carry: their weights would stand still or wander."""
        lossy = [slot.piece.name for slot in self.slots if slot.feedback is not None]
        if lossy and not self.carries:
            raise NanotrainError(
                f"the precision has the optimizer carry rounding errors, of {lossy[0]} and {len(lossy) - 1} "
                f"others, in its momentum; {type(self).__name__} has none as configured: expected adamw "
                "with betas[0] above 0, or sgd with momentum above 0"
            )

    def master(self, piece: Piece, precision: Precision) -> MasterWeight:
        """Return the master of one piece."""
        return precision.master(piece.weight, piece)

    @torch.no_grad()
    def step(self, *, loss_scale: float = 1.0) -> StepStats:
        """Unscale, clip, update, write the new weights through to the model."""
        gradient_of = self.gradients.gradient_of
        gradients = [gradient_of(slot.piece) for slot in self.slots]
        norm = self.norm.of(gradients) / loss_scale
        skipped = ~torch.isfinite(norm)
        late = self.mesh.reads_late and not self.encoded and self.skips_on_device
        if not late and skipped:  # the one place of a step where the host waits for the device
            return StepStats(norm, skipped=True)
        self._rescale(gradients, norm, loss_scale)
        self._update(gradients, skipped.float() if late else None)
        return StepStats(norm, skipped if late else False)

    @property
    def skips_on_device(self) -> bool:
        """Whether :meth:`update_plain` heeds ``found_inf``; if not, the host waits for each step's norm."""
        return False

    def _update(self, gradients: Sequence[torch.Tensor], found_inf: torch.Tensor | None) -> None:
        """Update plain masters all at once, and all others wave by wave."""
        if self.plain.slots:
            self.update_plain(gradients, found_inf)
            self.plain.write_back()  # of a skipped step, what is there already
        gradient_of = dict(zip(self.slots, gradients, strict=True)) if self.encoded else {}
        for wave in waves(self.encoded):
            for slot in wave:
                slot.load()
                slot.weight.grad = gradient_of[slot].to(slot.weight.device)
            with only(self.inner, wave):
                self.inner.step()
            for slot in wave:
                lost = slot.store()
                if lost is not None and slot.group["lr"]:
                    self.carry(slot, lost)

    def update_plain(self, gradients: Sequence[torch.Tensor], found_inf: torch.Tensor | None) -> None:
        """Take a step on the masters of ``plain``, in place, given all slots' gradients in their order.

        If ``found_inf``, a float32 scalar on the device, is 1, weights and state stay what they are, bit by
        bit. It is None unless :attr:`skips_on_device`. By default ``inner`` is told, as torch's fused
        optimizers are by its gradient scaler.
        """
        for weight, number in zip(self.plain.weights, self.plain.numbers, strict=True):
            weight.grad = gradients[number]
        with only(self.inner, self.plain.slots) if self.encoded else nullcontext():
            step_unless(found_inf, self.inner)
        for weight in self.plain.weights:
            weight.grad = None

    def _rescale(self, gradients: list[torch.Tensor], norm: torch.Tensor, loss_scale: float) -> None:
        """Divide by the loss scale and clip in one pass, without waiting for the device."""
        limit = self.config.clip_norm
        if not gradients or (not limit and loss_scale == 1.0):  # a rank may have no share of a small model
            return
        torch._foreach_mul_(gradients, clip_factor(norm, limit, gradients) / loss_scale)

    def blocks(self) -> Iterable[Block]:
        """Yield masters and state, each named after its parameter. Ranges of one share its scalars."""
        seen: set[str] = set()
        for slot in self.slots:
            for name, tensor in {**slot.master.state(), **self.inner.state[slot.weight]}.items():
                scalar = f"{name}/{slot.placement.name}"
                if tensor.shape or scalar not in seen:
                    yield from Block.of_piece(name, tensor, self.place(name, slot))
                if not tensor.shape:
                    seen.add(scalar)

    def meta(self) -> dict[str, Any]:
        """All state is in :meth:`blocks`."""
        return {}

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Give all ranges of a parameter the scalars that were read into the first."""
        first: dict[str, dict[str, torch.Tensor]] = {}
        for slot in self.slots:
            state = {**slot.master.state(), **self.inner.state[slot.weight]}
            scalars = {name: tensor for name, tensor in state.items() if not tensor.shape}
            for name, tensor in first.setdefault(slot.placement.name, scalars).items():
                state[name].copy_(tensor)


class AdamW(MasterOptimizer):
    """Adam with decoupled weight decay, torch's fused kernel on every device.

    Source: Loshchilov and Hutter, arXiv 1711.05101, algorithm 2.
    """

    config: AdamWConfig

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Return ``torch.optim.AdamW``, or what keeps its moments narrow."""
        config = self.config
        if config.moment_dtype == "float32":
            return FusedAdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
        return moments.LowPrecisionAdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)

    def state_of(self, slot: Slot) -> dict[str, torch.Tensor]:
        """Return two moments at zero, in the form they are kept in."""
        weight, carries = slot.weight, slot.feedback is not None
        kept = moments.initial_moments(weight, slot.piece, self.config.moment_dtype, carries=carries)
        return {"step": torch.zeros((), dtype=torch.float32, device=weight.device), **kept}

    @property
    def skips_on_device(self) -> bool:
        """So do moments of any dtype."""
        return True

    def place(self, name: str, slot: Slot) -> Piece:
        """Scales sit in a tensor of their own shape."""
        return moments.grouped(slot.piece) if name.endswith(moments.SCALE) else slot.piece

    @property
    def carries(self) -> bool:
        """Whether there is a first moment."""
        return self.config.betas[0] > 0

    def carry(self, slot: Slot, error: torch.Tensor) -> None:
        """Add ((1 - beta1^t) / lr) (1 - 1 / beta1) (sqrt(v / (1 - beta2^t)) + eps) error to the first moment.

        The t-th step has been taken. Steps to come use up beta1 + beta1^2 + ... of it: -lr times that is the
        error. Source: Nikdan et al., "ECO", arXiv 2601.22101, Adam's form.
        """
        state, (beta1, beta2) = self.inner.state[slot.weight], slot.group["betas"]
        first, second = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
        scale = (moments.load(state, "exp_avg_sq", error.dtype) / second).sqrt_().add_(slot.group["eps"])
        state["exp_avg"].add_(scale.mul_(error).mul_(first * ((1 - 1 / beta1) / slot.group["lr"])))


class SGD(MasterOptimizer):
    """Gradient descent, with heavy-ball momentum if asked."""

    config: SGDConfig

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Return ``torch.optim.SGD``, fused where a step may be skipped on the device."""
        fused = self.mesh.reads_late
        return torch.optim.SGD(groups, lr=self.config.lr, momentum=self.config.momentum, fused=fused)

    @property
    def skips_on_device(self) -> bool:
        """The fused kernel does."""
        return bool(self.inner.defaults["fused"])

    def initial_state(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the velocity at zero; torch starts it at the first gradient, which is the same."""
        return {"momentum_buffer": torch.zeros_like(weight)} if self.config.momentum else {}

    @property
    def carries(self) -> bool:
        """Whether there is a velocity."""
        return self.config.momentum > 0

    def carry(self, slot: Slot, error: torch.Tensor) -> None:
        """Add (1 / lr) (1 - 1 / momentum) error to the velocity. Source: arXiv 2601.22101, SGDM's form."""
        velocity = self.inner.state[slot.weight]["momentum_buffer"]
        velocity.add_(error, alpha=(1 - 1 / self.config.momentum) / slot.group["lr"])
