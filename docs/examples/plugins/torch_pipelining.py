"""Schedules of torch.distributed.pipelining: the order of its actions, run by the core's executor.

Sources: those that torch names, as Qi et al., arXiv 2401.10241, section 6, for `ZBVZeroBubble`. Its `1F1B` is
not here: `pipeline_order` of torch 2.13 lacks the first forward pass of the last rank.
"""

from types import SimpleNamespace
from typing import Literal

import attrs

from nanotrain_core.api import Action, Component, Range, Support, hookimpl, parts_between

ALONG_A_V = ("ZBVZeroBubble", "DualPipeV")


@attrs.define(frozen=True, kw_only=True)
class TorchPipeliningConfig:
    """`[schedule] use = "torch_pipelining"`."""

    order: Literal[
        "GPipe",
        "LoopedBFS",
        "Interleaved1F1B",
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
        "DualPipeV",
    ] = "Interleaved1F1B"
    """torch's name of it: the class without `Schedule`."""
    v: int = attrs.field(default=2, validator=Range(2, 64))
    """Virtual stages on each rank; `GPipe` has one, `ZBVZeroBubble` and `DualPipeV` two."""


@hookimpl
def nanotrain_register_schedule(register):
    register(
        Component(
            name="torch_pipelining",
            config=TorchPipeliningConfig,
            factory=f"{__name__}:TorchPipelining",
            summary="the order of a schedule of torch.distributed.pipelining",
            mesh_dims={"pp"},
            supports={"any_microbatches": Support.PARTIAL},
        )
    )


class TorchPipelining:
    def __init__(self, config):
        self.order = config.order
        self.v = 1 if self.order == "GPipe" else 2 if self.order in ALONG_A_V else config.v

    def parts(self, costs, pp):
        """Cut the layers into v pp stages of as equal numbers as can be."""
        layers, stages = len(costs.layers), pp * self.v
        if layers < stages:
            raise ValueError(
                f"{layers} layers cannot be cut into {stages} stages, {self.v} on each of pp = {pp} ranks; "
                f"expected at least {stages} layers"
            )
        ranks = [stage % pp for stage in range(stages)]
        if self.order in ALONG_A_V:
            ranks = [*range(pp), *reversed(range(pp))]
        return parts_between([layers * stage // stages for stage in range(stages + 1)], ranks)

    def actions(self, pp, microbatches):
        from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

        schedule = get_schedule_class(self.order)
        stages = [
            SimpleNamespace(group_rank=0, group_size=pp, num_stages=pp * self.v, submod=None)
            for _ in range(self.v)
        ]
        made = schedule(
            stages[0] if issubclass(schedule, PipelineScheduleSingle) else stages, microbatches
        )  # a ValueError of torch's says which numbers of microbatches there are
        return tuple(tuple(self.ours(made.pipeline_order[rank])) for rank in range(pp))

    def ours(self, row):
        """Yield the F, B and W of one rank's row, which has gaps, pairs and reductions besides."""
        for entry in row:
            for each in () if entry is None else entry.sub_actions or (entry,):
                kind = {"I": "B"}.get(each.computation_type.value, each.computation_type.value)
                if kind in ("F", "B", "W"):
                    yield Action(kind, each.stage_index, each.microbatch_index)
