"""Steps a ``torch.optim`` optimizer on the master weights of this rank's pieces.

A rank updates whole parameters or, with optimizer-state sharding (``zero12``), ranges of them. Plain masters
(float32 tensors) are updated all at once; others (4-bit or offloaded ones) are decoded, updated and encoded
in waves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from nanotrain_core.contracts import Block, GradientSync, MasterWeight, Optimizer, Precision, StepStats
from nanotrain_core.errors import NanotrainError, expect_result
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import Piece, PlacedParameter
from nanotrain_core.optim.averages import move_averages
from nanotrain_core.optim.grad_norm import GlobalNorm, clip_factor
from nanotrain_core.optim.master_shards import MasterShard, PlainWeights, restricted_to, step_unless, waves
from nanotrain_core.registry.contract_checks import check_masters

#: Ratio of learning rates of two steps beyond which one has jumped, as in a phase or a resumed run. Warm-up
#: from 0 doubles the rate at most.
LR_JUMP = 3.0

#: The kind of a weight's state that is its moving average.
EMA = "ema"


class MasterOptimizer(Optimizer):
    """Steps a ``torch.optim`` optimizer on the masters; subclasses define the optimizer and its state.

    One training step may call ``inner.step`` several times, each time with some of the weights in its groups,
    so whatever it changes must be of single weights: see :meth:`precondition` for a count of steps.
    See :class:`~nanotrain_core.contracts.Optimizer`.
    """

    momentum: str | None = None
    """The key in a weight's state of the momentum to which :meth:`carry` adds. It is rescaled when the
    learning rate jumps up, so that what it still has to move the weight by stays the same."""
    master_shards: list[MasterShard]
    """This rank's pieces, each with its master; empty on a rank without any. Set by :meth:`setup`."""
    mesh: Mesh
    """This rank's mesh. Set by :meth:`setup`."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self._last_lr = 0.0
        """The rate of the last step with one above 0, as :meth:`_lr` returns it; 0 before that."""

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Return the torch optimizer for parameter groups with the :meth:`options` of their shards.

        For ``adamw`` it is torch's fused AdamW (``fused_adamw.py``), or a variant with moments of other
        dtypes. One training step calls its ``step`` several times, each time with some of the weights in its
        groups, where masters are not plain: whatever ``step`` changes must be of single weights, or the first
        such call is refused.
        """
        raise NotImplementedError(f"{type(self).__name__} has no make(groups)")

    def options(self, shard: MasterShard) -> dict[str, Any]:
        """Return the options of the parameter group of a shard: shards with equal options share a group.

        By default matrices have the config's ``weight_decay``, which is 0 unless it is a key, all others 0.
        ``shard.placement`` has the name, the global shape, and the role: embeddings are ``Role.VOCAB``.
        """
        matrix = len(shard.placement.global_shape) > 1
        return {"weight_decay": self.config.weight_decay if matrix else 0.0}

    def precondition(self, gradients: list[torch.Tensor]) -> None:
        """Replace gradients, in the order of ``master_shards``, after clipping and before any update.

        Called once in each step that is not skipped, on all ranks, so it may use collectives: an update that
        needs whole matrices gathers them here, with
        :class:`~nanotrain_core.optim.whole_tensors.WholeTensors`. A count of steps for all weights together
        advances here too: ``inner.step`` may be called several times in a step, or never.
        """

    def precondition_unless(self, found_inf: torch.Tensor | None, gradients: list[torch.Tensor]) -> None:
        """Call :meth:`precondition`; override this instead to precondition without a host synchronization.

        If ``found_inf``, a float32 scalar on the device, is 1, state must stay as it is; gradients are not
        finite, and whatever becomes of them is not used. It is None unless :attr:`skips_on_device`.
        """
        self.precondition(gradients)

    def initial_state(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the state torch would create for ``weight`` at the first step."""
        raise NotImplementedError(f"{type(self).__name__} has no initial_state(weight)")

    def state_of(self, shard: MasterShard) -> dict[str, torch.Tensor]:
        """Return a shard's initial state, where it depends on more than the weight."""
        return self.initial_state(shard.weight)

    def place(self, name: str, shard: MasterShard) -> Piece:
        """Return the placement of a tensor of a shard's state: by default its weight's."""
        return shard.piece

    @property
    def carries(self) -> bool:
        """Whether :meth:`carry` is supported with this config."""
        return False

    def carry(self, shard: MasterShard, error: torch.Tensor) -> None:
        """Add to a shard's momentum so that later steps move its weight by ``error``, at a rate above 0."""
        raise NotImplementedError(f"{type(self).__name__} carries errors and has no carry(shard, error)")

    def setup(
        self,
        parameters: Sequence[PlacedParameter],
        precision: Precision,
        gradients: GradientSync,
        mesh: Mesh,
    ) -> None:
        """Create masters and allocate state.

        Raises:
            NanotrainError: ``inner`` trains at other weights than those to evaluate; or the precision needs
                error feedback, which this optimizer lacks.
        """
        self.gradients, self.mesh = gradients, mesh
        masters = {piece: self.master(piece, precision) for piece in gradients.pieces()}
        check_masters(masters.values())
        self.master_shards = [MasterShard(piece, master) for piece, master in masters.items()]
        made = self.make(self._groups())
        self.inner = expect_result(f"optimizer {type(self).__name__}", "make", made, torch.optim.Optimizer)
        if all(callable(getattr(self.inner, mode, None)) for mode in ("train", "eval")):
            raise NanotrainError(
                f"{type(self.inner).__name__} trains at other weights than those to evaluate (it has train() "
                "and eval()), which a recipe's optimizer cannot: expected one without, or a script"
            )
        rates = [float(group["lr"]) for group in self.inner.param_groups]
        self._scheduled = next((number for number, rate in enumerate(rates) if rate), 0)
        self._configured_lr = rates[self._scheduled]
        group_of = {weight: group for group in self.inner.param_groups for weight in group["params"]}
        for shard in self.master_shards:
            shard.group = group_of[shard.weight]
            average = {EMA: shard.weight.detach().clone()} if self.config.ema_decay else {}
            self.inner.state[shard.weight] = self.state_of(shard) | average
            if not shard.plain:
                shard.forget()
        self.plain = PlainWeights(self.master_shards)
        self.encoded = [shard for shard in self.master_shards if not shard.plain]
        self.norm = GlobalNorm([shard.placement for shard in self.master_shards], mesh)
        self._require_error_feedback()

    def _groups(self) -> list[dict[str, Any]]:
        """Return parameter groups of shards with equal options; without shards, one empty group."""
        groups, name = list[dict[str, Any]](), f"optimizer {type(self).__name__}"
        for shard in self.master_shards:
            options = expect_result(name, "options", self.options(shard), Mapping)
            found = next((each for each in groups if {**each, "params": 0} == {**options, "params": 0}), None)
            if found is None:
                groups.append(found := {"params": [], **options})
            found["params"].append(shard.weight)
        return groups or [{"params": [], "weight_decay": 0.0}]

    def _require_error_feedback(self) -> None:
        """Reject lossy masters without error feedback: their weights would stall or drift."""
        lossy = [shard.piece.name for shard in self.master_shards if shard.feedback is not None]
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
        gradients = [self.gradients.gradient_of(shard.piece) for shard in self.master_shards]
        norm = self.norm.of(gradients) / loss_scale
        skipped = ~torch.isfinite(norm)
        # Without found_inf, gradients must not be preconditioned in a step that is skipped.
        can_skip = self.skips_on_device and type(self).precondition is MasterOptimizer.precondition
        on_device = self.mesh.device_is_async and can_skip and not self.encoded
        if not on_device and skipped:  # the only host synchronization in a step
            return StepStats(norm, skipped=True)
        found_inf = skipped.float() if on_device else None
        self._rescale(gradients, norm, loss_scale)
        self.precondition_unless(found_inf, gradients)
        self._update(gradients, found_inf)
        return StepStats(norm, skipped if on_device else False)

    @property
    def skips_on_device(self) -> bool:
        """Whether :meth:`update_plain` supports ``found_inf``; if not, the host waits for the norm."""
        return False

    def _update(self, gradients: Sequence[torch.Tensor], found_inf: torch.Tensor | None) -> None:
        """Update plain masters all at once, and all others in waves."""
        if self.plain.shards:
            self.update_plain(gradients, found_inf)
            self.plain.write_back()  # a skipped step writes the existing values
            self._average(self.plain.shards, found_inf)
        self._rescale_carried_errors()
        gradient_of = dict(zip(self.master_shards, gradients, strict=True)) if self.encoded else {}
        for wave in waves(self.encoded):
            for shard in wave:
                shard.load()
                shard.weight.grad = gradient_of[shard].to(shard.weight.device)
            with restricted_to(self.inner, wave):
                self.inner.step()
            self._average(wave, None)
            for shard in wave:
                lost = shard.store()
                if lost is not None and shard.group["lr"]:
                    self.carry(shard, lost)

    def _average(self, shards: Iterable[MasterShard], found_inf: torch.Tensor | None) -> None:
        """Move the averages of updated weights, and by nothing if ``found_inf`` is 1."""
        if not self.config.ema_decay:
            return
        weights: list[torch.Tensor] = [shard.weight for shard in shards]
        averages = [self.inner.state[weight][EMA] for weight in weights]
        move_averages(averages, weights, 1.0 - self.config.ema_decay, found_inf)

    def _lr(self) -> float:
        """Return the scheduled learning rate of ``config.lr``: a schedule changes all groups' alike.

        That of this rank's first group may not be that of another's, and rank 0's is saved. A group may have
        a rate of 0 throughout.
        """
        now = self.inner.param_groups[self._scheduled]["lr"]
        return float(self.config.lr * now / self._configured_lr) if self._configured_lr else 0.0

    def _rescale_carried_errors(self) -> None:
        """Rescale momenta that carry errors if the learning rate jumps up.

        Errors were divided by the rate of their step, and are applied at those of later ones. What a schedule
        changes step by step is left to it: the momentum of gradients, which is in the same tensor, would lag.
        """
        last, now = self._last_lr, self._lr()
        self._last_lr = now or last
        if self.momentum and last and now > LR_JUMP * last:
            carrying = [self.inner.state[s.weight][self.momentum] for s in self.encoded if s.feedback]
            if carrying:
                torch._foreach_mul_(carrying, last / now)

    def update_plain(self, gradients: Sequence[torch.Tensor], found_inf: torch.Tensor | None) -> None:
        """Take a step on the masters of ``plain``, in place, given all shards' gradients in their order.

        If ``found_inf``, a float32 scalar on the device, is 1, weights and state stay bitwise unchanged. It
        is None unless :attr:`skips_on_device`. By default it is passed to ``inner``, as torch's gradient
        scaler passes it to fused optimizers.
        """
        for weight, number in zip(self.plain.weights, self.plain.numbers, strict=True):
            weight.grad = gradients[number]
        with restricted_to(self.inner, self.plain.shards) if self.encoded else nullcontext():
            step_unless(found_inf, self.inner)
        for weight in self.plain.weights:
            weight.grad = None

    def _rescale(self, gradients: list[torch.Tensor], norm: torch.Tensor, loss_scale: float) -> None:
        """Divide by the loss scale and clip in one pass, without a device synchronization."""
        limit = self.config.clip_norm
        if not gradients or (not limit and loss_scale == 1.0):  # a rank may have no shard of a small model
            return
        torch._foreach_mul_(gradients, clip_factor(norm, limit, gradients) / loss_scale)

    def blocks(self) -> Iterable[Block]:
        """Yield masters and state under ``state/parameter``.

        A scalar is yielded once per parameter, for its first range.
        """
        return self._blocks(self.master_shards)

    def blocks_of(self, parameters: Collection[str]) -> Iterable[Block]:
        """Yield masters and state of some parameters only."""
        return self._blocks(shard for shard in self.master_shards if shard.placement.name in parameters)

    def _blocks(self, shards: Iterable[MasterShard]) -> Iterable[Block]:
        seen: set[str] = set()
        for shard in shards:
            for name, tensor in {**shard.master.state(), **self.inner.state[shard.weight]}.items():
                scalar = f"{name}/{shard.placement.name}"
                if tensor.shape or scalar not in seen:
                    yield from Block.of_piece(name, tensor, self.place(name, shard))
                if not tensor.shape:
                    seen.add(scalar)

    def meta(self) -> dict[str, Any]:
        """Return the learning rate of the last step, if this optimizer's momentum may carry errors."""
        return {"last_lr": self._last_lr} if self.momentum and self.carries else {}

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Restore the rate; copy scalars that were read into a parameter's first range to all its ranges."""
        self._last_lr = float(meta.get("last_lr", 0.0))  # of a run that carried no errors
        first: dict[str, dict[str, torch.Tensor]] = {}
        for shard in self.master_shards:
            state = {**shard.master.state(), **self.inner.state[shard.weight]}
            scalars = {name: tensor for name, tensor in state.items() if not tensor.shape}
            for name, tensor in first.setdefault(shard.placement.name, scalars).items():
                state[name].copy_(tensor)
