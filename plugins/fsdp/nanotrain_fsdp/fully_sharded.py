"""torch's `fully_shard` (FSDP2, ZeRO-3): parameters, gradients and optimizer state in shards of rows.

Source: Zhao et al., arXiv 2304.11277; Rajbhandari et al., arXiv 1910.02054, section 5.3. A layer's weights
are gathered before it runs and freed after it. The core reads the DTensors left in the model. On ``meta``,
where nothing can be gathered, :mod:`.dry` does the same to plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from nanotrain_core.api import NanotrainError
from nanotrain_core.api.torch import AllReduceGradients, Mesh, PackedWeight, Parallel, PartOutput, Placements
from nanotrain_fsdp import FSDP2Config
from nanotrain_fsdp.dry import DryPart
from nanotrain_fsdp.units import Unit, units


class FSDP2(AllReduceGradients, Parallel):
    """AllReduceGradients reads the shards' gradients, and sums what is partial along other dimensions."""

    needs_gradient_hooks = True  # gradients are sent during backward, in every microbatch

    def __init__(self, config: FSDP2Config) -> None:
        super().__init__()
        self.config = config
        self.begun = False
        """Whether a step is in progress: if it is interrupted, torch keeps part of it."""
        self.sharded: set[str] = set()
        self.dry: list[DryPart] = []

    def shard(self, part: nn.Module, placements: Placements, mesh: Mesh) -> None:
        """Shard the parameters of each unit along its dimension of the mesh."""
        groups = {dim: mesh.group(dim) for dim in ("dp", "edp") if dim in mesh.layout.dims}
        dims = [dim for dim, group in groups.items() if group is not None]
        if "dp" not in dims:
            return
        found = list(units(part, placements, dims))
        whole = {each for unit in found for each in unit.parameters}
        self.sharded |= {name for name, each in part.named_parameters() if each in whole}
        if mesh.device.type == "meta":
            self.dry.append(DryPart(part, placements, mesh, self.config))
            wrap: Callable[[Unit], None] = self.dry[-1].wrap
        else:
            kept = {each for each in part.parameters() if each not in whole}
            wrap = self._wrapper(
                kept, {dim: group for dim, group in groups.items() if group}, mesh.device.type
            )
        for unit in found:
            if unit.inner:
                unit.module.register_forward_hook(lambda _, args, out: no_view(out))
            if unit.module is part:  # torch searches the output for tensors
                part.register_forward_hook(lambda _, args, out: (out.value, out.losses))
            wrap(unit)
        part.register_forward_hook(lambda _, args, out: PartOutput(*out))
        part.register_forward_hook(free_after_evaluation)
        part.register_forward_pre_hook(self.begin)

    def _wrapper(
        self, kept: set[nn.Parameter], groups: Mapping[str, ProcessGroup], device: str
    ) -> Callable[[Unit], None]:
        """Return what shards a unit; the parameters ``kept`` stay whole."""
        meshes = {
            dim: DeviceMesh.from_group(group, device, mesh_dim_names=(dim,)) for dim, group in groups.items()
        }

        def wrap(unit: Unit) -> None:
            fully_shard(
                unit.module,
                mesh=meshes[unit.dim],
                # None: torch frees layers, and keeps embedding and head, which backward begins with.
                reshard_after_forward=None if self.config.reshard_after_forward else False,
                mp_policy=MixedPrecisionPolicy(reduce_dtype=unit.reduce_dtype),
                ignored_params=kept,
            )
            assert isinstance(unit.module, FSDPModule)
            unit.module.set_gradient_divide_factor(1.0)
            unit.module.set_force_sum_reduction_for_comms(True)
            unit.module.set_reduce_scatter_unused_params(True)

        return wrap

    def begin(self, part: nn.Module, args: Any) -> None:
        """Note that a step has begun."""
        self.begun |= part.training

    def microbatch_done(self, parameters: Collection[nn.Parameter]) -> None:
        """Add the shards' gradients of a microbatch to those before."""
        super().microbatch_done(parameters)
        for each in self.dry:
            each.add_gradients(self.dtype)

    def finish(self) -> None:
        """Sum what is partial along other dimensions, and note the end of the step."""
        super().finish()
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
        """Reject W passes, and parameters in shards that are packed or of several stages of this rank.

        Raises:
            NanotrainError: there are some.
        """
        if self.passes.splits_backward:
            raise NanotrainError(
                "fsdp2: a layer's gradients are sent when its backward ends, so there are no W passes: take "
                "a schedule without them, such as 1f1b"
            )
        for placed in self.placed:
            name = placed.placement.name
            if name in self.sharded and len(placed.parts) > 1:
                raise NanotrainError(f"fsdp2: {name} is held by two stages of one rank")
            if name in self.sharded and isinstance(placed.parameter, PackedWeight):  # in a dry run
                raise NanotrainError(f"fsdp2: {name} cannot be packed: set precision.packed = false")


def no_view(out: Any) -> Any:
    """Return a copy: torch's hook on a view would be lost if the view were modified in place."""
    return out.clone() if torch.is_tensor(out) else out


def free_after_evaluation(part: nn.Module, args: Any, out: Any) -> None:
    """Free gathered weights that no backward pass will: weights may change before they are read again."""
    if not torch.is_grad_enabled():
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
