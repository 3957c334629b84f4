"""torch's `fully_shard` (FSDP2, ZeRO-3): parameters, gradients and optimizer state in shards of rows.

Source: Zhao et al., arXiv 2304.11277; Rajbhandari et al., arXiv 1910.02054, section 5.3. A layer's weights
are gathered before it runs and freed after it. The core reads the DTensors left in the model.
"""

import attrs

from nanotrain_core.api import Component, NanotrainError, Role, hookimpl, tagged


@attrs.define(frozen=True, kw_only=True)
class FSDP2Config:
    """`[[parallel]] use = "fsdp2"`, in place of ddp and zero12."""


@hookimpl
def nanotrain_register_parallel(register):
    register(
        Component(
            name="fsdp2",
            config=FSDP2Config,
            factory=f"{__name__}:build",
            summary="parameters sharded by torch's fully_shard (ZeRO-3)",
            provides={"gradient_sync"},
            mesh_dims={"dp"},
        )
    )


def build(config):
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    from nanotrain_core.api.torch import AllReduceGradients, Parallel, PartOutput

    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise NanotrainError(f"fsdp2: expected torch 2.13 or later, got {torch.__version__}")

    def no_view(out):
        """Return a copy: torch's hook on a view would be lost if the view were modified in place."""
        return out.clone() if torch.is_tensor(out) else out

    class FSDP2(AllReduceGradients, Parallel):
        """AllReduceGradients reads the shards' gradients, and sums what is partial along other dimensions."""

        begun = False  # whether a step is in progress: if it is interrupted, torch keeps part of it

        def shard(self, part, placements, mesh):
            if mesh.device.type == "meta":
                raise NanotrainError(
                    "fsdp2: fully_shard computes on no meta device: plan with zero12's stage 2"
                )
            groups = {dim: mesh.group(dim) for dim in ("dp", "edp") if dim in mesh.layout.dims}
            if groups["dp"] is None:
                return
            meshes = {
                dim: DeviceMesh.from_group(group, mesh.device.type, mesh_dim_names=(dim,))
                for dim, group in groups.items()
                if group is not None
            }
            along = {
                parameter: next((dim for dim in meshes if dim in placements[name].summed), None)
                for name, parameter in part.named_parameters()
                if parameter.requires_grad
            }
            kept = {each for each in part.parameters() if along.get(each) is None}

            def whole(module, dim="dp"):
                """Shard the parameters that no submodule has sharded."""
                narrow = any(each.dtype.itemsize < 4 for each in module.parameters())
                sums = MixedPrecisionPolicy(reduce_dtype=torch.float32 if narrow else None)
                options = {"reshard_after_forward": True, "mp_policy": sums, "ignored_params": kept}
                fully_shard(module, mesh=meshes[dim], **options)
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                module.set_reduce_scatter_unused_params(True)

            usual = next(part.parameters()).dtype
            for module in part.modules():  # experts, and norms wider than matrices
                own = {
                    (each.dtype, along[each]) for each in module.parameters(recurse=False) if each not in kept
                }
                if own - {(usual, "dp")}:
                    module.register_forward_hook(lambda _, args, out: no_view(out))
                    whole(module, min(dim for _, dim in own))
            for _, module, tag in tagged(part):
                if tag.role is Role.BLOCK:
                    whole(module)
            # torch searches the output for tensors:
            part.register_forward_hook(lambda _, inputs, out: (out.value, out.losses))
            whole(part)
            part.register_forward_hook(lambda _, inputs, out: PartOutput(*out))
            part.register_forward_pre_hook(self.begin)

        def begin(self, part, _):
            self.begun |= part.training

        def finish(self):
            super().finish()
            self.begun = False

        def zero(self):
            if self.begun:
                raise NanotrainError("fsdp2: a step was broken off: resume in another engine, or process")
            super().zero()

        def check(self, mesh):
            if self.passes.splits_backward:
                raise NanotrainError(
                    "fsdp2: a layer's gradients are sent when its backward ends: no W passes"
                )
            for placed in self.placed:
                if placed.dtensor is not None and len(placed.parts) > 1:
                    raise NanotrainError(f"fsdp2: {placed.placement.name} is held by two stages of one rank")

    return FSDP2()
