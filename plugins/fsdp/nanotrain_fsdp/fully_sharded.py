"""torch's `fully_shard` (FSDP2, ZeRO-3): parameters, gradients and optimizer state in shards of rows.

Source: Zhao et al., arXiv 2304.11277; Rajbhandari et al., arXiv 1910.02054, section 5.3. A layer's weights
are gathered before it runs and freed after it. The core reads the DTensors left in the model. On ``meta``,
where nothing can be gathered, :mod:`.dry` does the same to plain tensors.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from nanotrain_core.api import NanotrainError
from nanotrain_core.api.torch import AllReduceGradients, Mesh, PackedWeight, Parallel, PartOutput, Placements
from nanotrain_fsdp import FSDP2Config
from nanotrain_fsdp.dry import DryPart
from nanotrain_fsdp.packed import let_shard
from nanotrain_fsdp.units import Axes, Unit, axes_of, units


class FSDP2(AllReduceGradients, Parallel):
    """AllReduceGradients reads the shards' gradients, and sums what is partial along other dimensions."""

    needs_gradient_hooks = True  # gradients are sent during backward, in every microbatch

    def __init__(self, config: FSDP2Config) -> None:
        super().__init__()
        self.config = config
        self.begun = False
        """Whether a step is in progress: if it is interrupted, torch keeps part of it."""
        self.sharded: set[str] = set()
        self.parts: list[FSDPModule | DryPart] = []
        self.part_of: dict[torch.Tensor, FSDPModule | DryPart] = {}
        """Of shards: while weights are gathered, modules have others."""

    def shard(self, part: nn.Module, placements: Placements, mesh: Mesh) -> None:
        """Shard the parameters of each unit along its dimension of the mesh.

        Raises:
            NanotrainError: another stage of this rank has one of them, or one is packed and trained.
        """
        axes = axes_of(mesh.layout)
        if "dp" not in axes:
            return
        if both := self.sharded & {name for name, _ in part.named_parameters()}:
            raise NanotrainError(f"fsdp2: {min(both)} is held by two stages of one rank")
        let_shard(part)
        found = list(units(part, placements, {dim: mesh.size(each.shard) for dim, each in axes.items()}))
        dim_of = {each: unit.dim for unit in found for each in unit.parameters}
        for name, each in part.named_parameters():
            if each in dim_of:
                if isinstance(each, PackedWeight) and each.requires_grad:
                    text = "is packed and trained, and packed shards are of frozen weights alone"
                    raise NanotrainError(f"fsdp2: {name} {text}: set precision.packed = false")
                self.sharded.add(name)
                placements[name] = axes[dim_of[each]].place(placements[name], mesh.layout)
        dry = DryPart(part, placements, mesh, self.config, axes) if mesh.device.type == "meta" else None
        kept = {each for each in part.parameters() if each not in dim_of}
        meshes = {} if dry else {dim: device_mesh(each, mesh) for dim, each in axes.items()}
        for unit in found:
            if unit.inner:
                unit.module.register_forward_hook(lambda _, args, out: no_view(out))
            if unit.module is part:  # torch searches the output for tensors
                part.register_forward_hook(lambda _, args, out: (out.value, out.losses))
            if dry:
                dry.wrap(unit)
            else:
                self._wrap(unit, meshes[unit.dim], kept)
        self.parts.append(dry or as_sharded(part))
        part.register_forward_hook(lambda _, args, out: PartOutput(*out))
        part.register_forward_hook(free_after_evaluation)
        part.register_forward_pre_hook(self.begin)

    def _wrap(self, unit: Unit, mesh: DeviceMesh, kept: set[nn.Parameter]) -> None:
        """Shard a unit; the parameters ``kept`` stay whole."""
        fully_shard(
            unit.module,
            mesh=mesh,
            # None: torch frees layers, and keeps embedding and head, which backward begins with.
            reshard_after_forward=None if self.config.reshard_after_forward else False,
            mp_policy=MixedPrecisionPolicy(reduce_dtype=unit.reduce_dtype),
            ignored_params=kept,
        )
        module = as_sharded(unit.module)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_reduce_scatter_unused_params(True)
        module.set_requires_all_reduce(False)

    def begin(self, part: nn.Module, args: Any) -> None:
        """Note that a step has begun."""
        self.begun |= part.training

    def last_microbatch(self, parameters: Collection[nn.Parameter]) -> None:
        """Have the replicas of shards all-reduce gradients, which accumulated until now, in these parts."""
        super().last_microbatch(parameters)
        for part in {self.part_of[each] for each in parameters if each in self.part_of}:
            part.set_requires_all_reduce(True)

    def microbatch_done(self, parameters: Collection[nn.Parameter]) -> None:
        """Add the shards' gradients of a microbatch to those before."""
        super().microbatch_done(parameters)
        for each in self.parts:
            if isinstance(each, DryPart):
                each.add_gradients(self.dtype)

    def finish(self) -> None:
        """Sum what is partial along other dimensions, and note the end of the step."""
        super().finish()
        for part in self.parts:
            part.set_requires_all_reduce(False)
        self.begun = False

    def zero(self) -> None:
        """Clear all gradients.

        Raises:
            NanotrainError: the step was interrupted: torch still holds a part of its gradients.
        """
        if self.begun:
            raise NanotrainError("fsdp2: a step was broken off: resume in another engine, or process")
        super().zero()

    def check(self, mesh: Mesh) -> None:
        """Reject W passes.

        Raises:
            NanotrainError: there are some.
        """
        if self.passes.splits_backward:
            raise NanotrainError(
                "fsdp2: a layer's gradients are sent when its backward ends, so there are no W passes: take "
                "a schedule without them, such as 1f1b"
            )
        for placed in self.placed:
            if placed.placement.name in self.sharded:
                own = placed.parameter if placed.dtensor is None else placed.dtensor
                self.part_of[own] = self.parts[placed.parts[0]]


def as_sharded(module: nn.Module) -> FSDPModule:
    """Return a module that ``fully_shard`` has given methods to."""
    assert isinstance(module, FSDPModule)
    return module


def device_mesh(axes: Axes, mesh: Mesh) -> DeviceMesh:
    """Return the mesh of one or two dimensions that ``fully_shard`` takes, of groups that are there."""
    dims, device = axes.dims, mesh.device.type
    groups = [group for dim in dims if (group := mesh.group(dim)) is not None]
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device, mesh_dim_names=dims)
    ranks = torch.tensor(mesh.ranks(*dims)).view([mesh.size(dim) for dim in dims])
    return DeviceMesh.from_group(groups, device, ranks, mesh_dim_names=dims)


def no_view(out: Any) -> Any:
    """Return a copy: torch's hook on a view would be lost if the view were modified in place."""
    return out.clone() if torch.is_tensor(out) else out


def free_after_evaluation(part: nn.Module, args: Any, out: Any) -> None:
    """Free gathered weights that no backward pass will: weights may change before they are read again."""
    if not torch.is_grad_enabled():
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
