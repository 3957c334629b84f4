"""torch's `fully_shard` (FSDP2, ZeRO-3) along dp: parameters, gradients and optimizer state in shards of rows.

Source: Zhao et al., arXiv 2304.11277; Rajbhandari et al., arXiv 1910.02054, section 5.3. A layer's weights are
gathered before it runs and freed after. The core reads the DTensors that it leaves into placements.
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

    class FSDP2(AllReduceGradients, Parallel):
        """What is partial along other dimensions than dp, AllReduceGradients adds up."""

        reads_dtensors = True

        def apply(self, part, placements, mesh):
            return part

        def shard(self, part, placements, mesh):
            group = mesh.group("dp")
            if group is None:
                return
            for name, parameter in part.named_parameters():
                if parameter.requires_grad and "dp" not in placements[name].summed:
                    raise NanotrainError(f"fsdp2: {name} is not replicated along dp, as experts are not")
            own = DeviceMesh.from_group(group, mesh.device.type, mesh_dim_names=("dp",))
            frozen = {each for each in part.parameters() if not each.requires_grad}

            def whole(module):
                """Shard what a module has and none below it has sharded: parameters of one dtype."""
                narrow = any(each.dtype.itemsize < 4 for each in module.parameters())
                sums = MixedPrecisionPolicy(reduce_dtype=torch.float32 if narrow else None)
                fully_shard(module, mesh=own, reshard_after_forward=True, mp_policy=sums, ignored_params=frozen)

            usual = next(part.parameters()).dtype
            for module in part.modules():
                if {each.dtype for each in module.parameters(recurse=False)} - {usual}:
                    whole(module)
            for _, module, tag in tagged(part):
                if tag.role is Role.BLOCK:
                    whole(module)
            part.register_forward_hook(lambda _, inputs, out: (out.value, out.losses))  # which torch looks into
            whole(part)
            part.register_forward_hook(lambda _, inputs, out: PartOutput(*out))
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(1.0)
                    module.set_force_sum_reduction_for_comms(True)
                    module.set_reduce_scatter_unused_params(True)

        def check(self, mesh):
            if self.passes.splits_backward:
                raise NanotrainError("fsdp2: a layer's gradients are sent when its backward ends: no W passes")
            for placed in self.placed:
                if placed.dtensor is not None and len(placed.parts) > 1:
                    raise NanotrainError(f"fsdp2: {placed.placement.name} is held by two stages of one rank")

        def microbatch_done(self, parameters):
            """Add up this rank's shards, in the run's dtype."""
            for placed in self.placed:
                if placed.dtensor is not None and placed.dtensor.grad is not None:
                    mine = placed.dtensor.grad.to_local()
                    placed.dtensor.grad = None
                    before = placed.parameter.grad
                    placed.parameter.grad = mine.to(self.dtype or mine.dtype) if before is None else before.add_(mine)

    return FSDP2()
