"""What ``fully_shard`` does in a step, on ``meta`` tensors: the same collectives and buffers, for a planner.

The names and the order of things follow torch's ``FSDPParamGroup``. A module computes with whole parameters
that take no memory; a buffer of their size stands for them from their all-gather until they are freed.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from math import prod
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.variable import Variable
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from nanotrain_core.api.torch import Exchange, Mesh, Placements, storage_of
from nanotrain_fsdp import FSDP2Config
from nanotrain_fsdp.packed import PackedShard
from nanotrain_fsdp.units import Axes, Unit


class DryPart:
    """The units of one model part, and what they share in a step."""

    def __init__(
        self,
        part: nn.Module,
        placements: Placements,
        mesh: Mesh,
        config: FSDP2Config,
        axes: Mapping[str, Axes],
    ) -> None:
        self.placements, self.mesh, self.config, self.axes = placements, mesh, config, axes
        self.part = part
        self.names = {parameter: name for name, parameter in part.named_parameters()}
        """Of whole parameters, which are dropped when they are sharded."""
        self.units: list[DryUnit] = []
        self.order: list[DryUnit] = []
        """Units in the order of their forward passes: backward gathers the one before ahead of time."""
        self.gathered: torch.Tensor | None = None
        """What the last all-gather of a forward pass received: it is freed after the next one."""
        self.sent: torch.Tensor | None = None
        """What the last reduce-scatter sends."""
        self.in_backward = False
        self.all_reduces = False

    def set_requires_all_reduce(self, wanted: bool) -> None:
        """Choose whether backward passes all-reduce gradients over the replicas of shards."""
        self.all_reduces = wanted

    def wrap(self, unit: Unit) -> None:
        """Shard the parameters of ``unit``, and gather them around its passes."""
        whole_until_backward = not self.config.reshard_after_forward or unit.module is self.part
        self.units.append(DryUnit(unit, self, frees=not whole_until_backward))
        if unit.module is self.part:  # also one that has no parameters beside its layers'
            unit.module.register_forward_hook(self.end_forward)

    def end_forward(self, module: nn.Module, args: Any, out: Any) -> None:
        """Free what the last all-gather received."""
        self.gathered = None

    def begin_backward(self) -> None:
        """Have :meth:`end_backward` called after the backward pass that is running."""
        if not self.in_backward:
            self.in_backward = True
            Variable._execution_engine.queue_callback(self.end_backward)

    def end_backward(self) -> None:
        """Send gradients of units whose inputs have none: first of all the part itself, the last unit."""
        for unit in (self.units[-1], *self.units[:-1]):
            unit.end_backward()
        self.order.clear()
        self.sent, self.in_backward = None, False

    def add_gradients(self, dtype: torch.dtype | None) -> None:
        """Add the gradients of a microbatch to those of earlier ones."""
        for unit in self.units:
            for shard in unit.shards:
                if (new := shard.gradient) is not None:
                    before, shard.gradient = shard.own.grad, None
                    shard.own.grad = new.to(dtype or new.dtype) if before is None else before.add_(new)


@attrs.define(eq=False)
class Shard:
    """This rank's rows of one parameter."""

    own: nn.Parameter
    whole: nn.Parameter
    holders: list[tuple[nn.Module, str]]
    padded: int
    """Elements of the largest shard of any rank."""
    sent: int
    """Bytes that each rank sends of it."""
    gradient: torch.Tensor | None = None

    def show(self, parameter: nn.Parameter) -> None:
        """Make it what the modules have."""
        for module, name in self.holders:
            setattr(module, name, parameter)


State = Enum("State", ["IDLE", "FORWARD", "PRE_BACKWARD", "POST_BACKWARD"])


class DryUnit:
    """A module whose parameters are gathered together."""

    def __init__(self, unit: Unit, part: DryPart, *, frees: bool) -> None:
        axes = part.axes[unit.dim]
        group = part.mesh.group(axes.shard)
        assert group is not None
        self.replicas = part.mesh.group(axes.replicate) if axes.replicate else None
        self.part, self.frees, self.reduce_dtype = part, frees, unit.reduce_dtype
        self.exchange = Exchange(group, part.mesh.device)  # torch calls the backend's own on any device
        self.shards = [self._shard(each, unit, axes.shard) for each in unit.parameters]
        dtypes = {storage_of(each.own).dtype for each in self.shards}
        self.sends = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        """What weights of several dtypes, or packed ones, are gathered as: bytes."""
        self.state = State.IDLE
        self.places: list[int] = []
        """Where its forward passes are in the part's order."""
        self.arriving: torch.Tensor | None = None
        self.weights: torch.Tensor | None = None
        """Stands for the memory of the whole parameters, while they are there."""
        self.partial: torch.Tensor | None = None
        """Gradients that replicas have yet to all-reduce."""
        self.reduced: torch.Tensor | None = None
        """What they all-reduced last, held until the end of the backward pass."""
        if self.shards:
            unit.module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
            unit.module.register_forward_hook(self.after_forward)

    def _shard(self, parameter: nn.Parameter, unit: Unit, dim: str) -> Shard:
        name, size = self.part.names.pop(parameter), self.exchange.size
        rows, *rest = parameter.shape
        chunk = -(-rows // size)  # as torch.chunk splits: the last ranks may have fewer, or none
        begin, end = (min(rows, chunk * (self.exchange.rank + by)) for by in (0, 1))
        self.part.placements[name] = self.part.placements[name].cut(0, dim, begin, end)
        holders = [
            (module, key)
            for module in unit.module.modules()
            for key, each in module.named_parameters(recurse=False)
            if each is parameter
        ]
        trained = parameter.requires_grad
        own = nn.Parameter(parameter.new_empty((end - begin, *rest)), trained)
        # A recorder counts a tensor's memory when it is made.
        stored = storage_of(parameter)
        empty = torch.empty(0, dtype=stored.dtype, device="meta").resize_(stored.shape)
        if isinstance(parameter, PackedShard):
            empty = parameter.stored_in(empty)
        whole = nn.Parameter(empty, trained)
        padded = chunk * prod(rest)
        shard = Shard(own, whole, holders, padded, padded * stored.nbytes // parameter.numel())
        shard.show(own)
        return shard

    # --- weights --------------------------------------------------------------------------------

    def gather(self) -> None:
        """All-gather the parameters of a module, unless they are there or on their way."""
        if self.arriving is not None or self.weights is not None:
            return
        own = [storage_of(each.own).view(-1).view(self.sends) for each in self.shards]
        sent = [each.sent // self.sends.itemsize for each in self.shards]
        out = own[0].new_empty(self.exchange.size, sum(sent))
        row = out[self.exchange.rank]
        parts = torch.split(row, sent)
        fill = [part[: len(each)] for part, each in zip(parts, own, strict=True)]
        torch._foreach_copy_(fill, own)
        self.exchange.all_gather_into(out, row)()
        self.arriving = out

    def wait(self) -> None:
        """Copy what has arrived into the parameters; then what a forward pass received before is freed."""
        if self.arriving is None:
            return
        self.weights = torch.empty_like(self.arriving).copy_(self.arriving)
        if self.state is State.FORWARD:
            self.part.gathered = self.arriving
        self.arriving = None
        for each in self.shards:
            each.show(each.whole)

    def free(self) -> None:
        """Free the whole parameters."""
        if self.weights is not None:
            self.weights = None
            for each in self.shards:
                each.show(each.own)

    # --- forward --------------------------------------------------------------------------------

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Gather the parameters, and see to it that backward ends with the reduce-scatter."""
        again = self.state is State.PRE_BACKWARD  # activation checkpointing
        if not again:
            self.state = State.FORWARD
        self.gather()
        self.wait()
        leaves, form = tree_flatten((args, kwargs))
        traced = [n for n, each in enumerate(leaves) if torch.is_tensor(each) and each.requires_grad]
        if traced and not again and torch.is_grad_enabled():
            out = AfterBackward.apply(self, *(leaves[n] for n in traced))  # type: ignore[no-untyped-call]
            for n, each in zip(traced, out, strict=True):
                leaves[n] = each
        return tree_unflatten(leaves, form)  # type: ignore[no-any-return]

    def after_forward(self, module: nn.Module, args: Any, out: Any) -> None:
        """Free the parameters, and gather them again when a gradient of the output is there."""
        if self.state is State.PRE_BACKWARD:
            return
        if not self.part.in_backward:
            if self.frees:
                self.free()
            self.places.append(len(self.part.order))
            self.part.order.append(self)
        self.state = State.IDLE
        for each in tree_leaves(out):
            if torch.is_tensor(each) and each.requires_grad:
                each.register_hook(self.before_backward)  # type: ignore[no-untyped-call]

    # --- backward -------------------------------------------------------------------------------

    def before_backward(self, gradient: torch.Tensor) -> None:
        """Gather the parameters, and those of the unit whose backward pass comes next."""
        self.part.begin_backward()
        if self.state is State.PRE_BACKWARD:
            return
        self.state = State.PRE_BACKWARD
        self.gather()
        self.wait()
        place = self.places.pop() if self.places else 0
        if place > 0:
            self.part.order[place - 1].gather()

    def reduce(self) -> None:
        """Reduce-scatter the gradients of a module's parameters, and free these.

        Replicas of the shards all-reduce them in the last microbatch.
        """
        self.state = State.POST_BACKWARD
        trained = [each for each in self.shards if each.own.requires_grad]
        wholes = [each.whole for each in trained]
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in wholes]
        for each in wholes:
            each.grad = None
        self.free()
        self.part.sent = None
        if not trained:
            return
        size, dtype = self.exchange.size, self.reduce_dtype or gradients[0].dtype
        numel = sum(each.padded for each in trained)
        rows = gradients[0].new_empty(size, numel, dtype=dtype)
        torch._chunk_cat(gradients, 0, size, out=rows)
        gradients.clear()
        own = rows.new_empty(1, numel)
        self.exchange.reduce_scatter_into(own, rows)()
        self.part.sent = rows
        if self.replicas is not None:
            if self.partial is not None:
                own = self.partial.add_(own) if not self.part.all_reduces else own.add_(self.partial)
            self.partial = None if self.part.all_reduces else own
            if self.partial is not None:
                return
            dist.all_reduce(own, group=self.replicas)
            self.reduced = own
        own = own.to(trained[0].own.dtype)
        parts = torch.split(own[0], [each.padded for each in trained])
        for shard, part in zip(trained, parts, strict=True):
            new = part[: shard.own.numel()].view(shard.own.shape)
            shard.gradient = new if shard.gradient is None else shard.gradient.add_(new)

    def end_backward(self) -> None:
        """Send what was not sent, and begin anew."""
        if self.shards and self.state is not State.POST_BACKWARD:
            self.reduce()
        self.state, self.arriving, self.reduced = State.IDLE, None, None
        self.places.clear()


class AfterBackward(torch.autograd.Function):
    """Reduce-scatters the gradients of a module's parameters when those of its inputs are there."""

    @staticmethod
    def forward(ctx: Any, unit: DryUnit, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.unit = unit
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        ctx.unit.reduce()
        return (None, *gradients)
