"""torch's DistributedDataParallel as gradient sync: its buckets, overlap and communication hooks.

Source: Li et al., arXiv 2006.15704. Only DDP's reducer is used, which needs no forward pass of DDP: as
torch.distributed.pipelining does, `last_microbatch` prepares it before a stage's last backward pass, since
other microbatches may have run forward since. Gradients of earlier ones accumulate, as in `no_sync()`.
"""

from typing import Literal

import attrs

from nanotrain_core.api import Component, Range, hookimpl


@attrs.define(frozen=True, kw_only=True)
class TorchDDPConfig:
    """`[[parallel]] use = "torch_ddp"`."""

    bucket_mb: float = attrs.field(default=25.0, validator=Range(1e-6, 1e6))
    """MiB (2^20 bytes) of gradients in one all-reduce."""
    compress: Literal["bf16", "fp16"] | None = None
    """What gradients are sent and added up in, by torch's hooks of that name; `bf16` needs NCCL."""


@hookimpl
def nanotrain_register_parallel(register):
    register(
        Component(
            name="torch_ddp",
            config=TorchDDPConfig,
            factory=f"{__name__}:build",
            summary="torch's DistributedDataParallel, its gradients summed",
            provides={"gradient_sync"},
            mesh_dims={"dp"},
        )
    )


def build(config):
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel

    from nanotrain_core.api import NanotrainError
    from nanotrain_core.api.torch import AllReduceGradients, Parallel

    def summed(group, bucket):
        """All-reduce a bucket. With a communication hook DDP does not divide by the number of ranks."""
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    hook = (
        getattr(default_hooks, f"{config.compress}_compress_wrapper")(summed) if config.compress else summed
    )

    class TorchDDP(AllReduceGradients, Parallel):
        needs_gradient_hooks, reads_dtensors = True, False

        def sums_after_backward(self, placed, span):
            """Return whether a gradient is complete only after several parts have run backward."""
            return bool(span.stages) or len(placed.parts) > 1

        def check(self, mesh):
            """Called by `attach`: make a DDP of what each model part sums over the same ranks."""
            together = {}
            for placed in self.placed:
                parameter, span = placed.parameter, placed.placement.sync_span(mesh.layout)
                if not span or not parameter.requires_grad:
                    continue
                if self.dtype not in (None, parameter.dtype):
                    raise NanotrainError(
                        f"torch_ddp: {placed.placement.name} is {parameter.dtype}, and its gradient to be "
                        f"{self.dtype}; DDP has both alike: use ddp, or [precision] use = 'fp32'"
                    )
                if not self.sums_after_backward(placed, span):
                    together.setdefault((placed.parts[0], span), []).append(parameter)
            if together and mesh.device.type == "meta":
                raise NanotrainError("torch_ddp: DDP's reducer runs on no meta device: plan with ddp")
            self.members = {}
            for (_, span), members in sorted(together.items(), key=lambda each: each[0]):
                group = mesh.group_of(span)
                ddp = DistributedDataParallel(
                    nn.ParameterList(members),
                    process_group=group,
                    bucket_cap_mb=config.bucket_mb,
                    gradient_as_bucket_view=True,
                )
                ddp.register_comm_hook(group, hook)
                self.members[ddp] = members
            self.ddp_of = {parameter: ddp for ddp, members in self.members.items() for parameter in members}

        def last_microbatch(self, parameters):
            super().last_microbatch(parameters)
            self.arrived = set()
            for ddp in self.ddps(parameters):
                ddp.reducer.prepare_for_backward([])  # every parameter is waited for

        def ddps(self, parameters):
            return dict.fromkeys(self.ddp_of[each] for each in parameters if each in self.ddp_of)

        def on_final_gradient(self, parameter):
            self.arrived.add(parameter)

        def backward_done(self, parameters):
            """Pass zeros through autograd to parameters without a gradient: the reducer waits for all."""
            for ddp in self.ddps(parameters):
                missing = [each for each in self.members[ddp] if each not in self.arrived]
                if missing:
                    torch.autograd.backward(missing, [torch.zeros_like(each) for each in missing])

        def zero(self):
            """Also reset reducers, which wait for the gradients of an interrupted last backward pass."""
            for ddp in self.ddps(self._in_last_microbatch):
                ddp.reducer._reset_state()
            super().zero()

    return TorchDDP()
