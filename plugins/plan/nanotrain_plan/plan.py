"""The plan of a recipe: all results as one object, which is shown or written as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from nanotrain_core.api import (
    Layout,
    NanotrainError,
    PhaseTimeline,
    Recipe,
    Registry,
    gpu_refusals,
)
from nanotrain_plan.assumptions import assumptions
from nanotrain_plan.blocks.schedules import RememberedSchedules
from nanotrain_plan.budget import Checkpoints, HostMemory, checkpoints, host_memory
from nanotrain_plan.comms import AxisTraffic, Links, phases_of, traffic
from nanotrain_plan.data_use import DataUse, data_use
from nanotrain_plan.hardware import Hardware
from nanotrain_plan.memory import (
    Activation,
    RankMemory,
    activations,
    activations_by_stage,
)
from nanotrain_plan.model import Parameters, TokenFLOPs, count_flops, count_parameters
from nanotrain_plan.phase_stages import PhaseStages, highest_memory, planned_phase
from nanotrain_plan.run_phases import RunPhase, run_phases
from nanotrain_plan.stages import Stages, dry_stages
from nanotrain_plan.timing import StepTime, Timer, step_time

#: Of what ``--json`` prints: grows by a minor number with a key, by a major one when a key changes meaning.
VERSION = "4.5"


#: What a message begins with where a recipe cannot be planned; the reason follows.
NO_PLAN = "this recipe cannot be planned: "


@attrs.define(frozen=True, kw_only=True, eq=False)
class Plan:
    """The plan of one recipe for one number of ranks and one hardware."""

    recipe: Recipe
    layout: Layout
    hardware: Hardware
    stages: Stages
    parameters: Parameters
    flops: TokenFLOPs
    memory: Sequence[RankMemory]
    """Of every pipeline rank, in the phase with the highest peak."""
    memory_phase: str
    """That phase's name if it is not the one that the values of a step are of, else empty."""
    phase: str
    """Name of the phase that the values of a step are of; empty of a recipe without phases."""
    time: StepTime
    """Of a step of the phase with most tokens in a microbatch, as all values of a step."""
    phases: Sequence[RunPhase]
    """Empty of a recipe without."""
    traffic: Mapping[int, Sequence[AxisTraffic]]
    """Collectives of a step, of one pipeline rank of each kind: those of :attr:`Stages.steps`."""
    checkpoints: Checkpoints
    data: DataUse
    host: HostMemory
    assumptions: Sequence[str]
    refusals: Sequence[str]
    """Why components of the recipe cannot run on this hardware."""

    @property
    def ranks(self) -> int:
        """World size."""
        return self.layout.world_size

    @property
    def worst(self) -> RankMemory:
        """The pipeline rank with the highest peak."""
        return max(self.memory, key=lambda rank: rank.peak)

    @property
    def loudest(self) -> int:
        """The pipeline rank with the most time in collectives that is not hidden by computation."""
        return max(self.traffic, key=lambda pp_rank: sum(each.exposed for each in self.traffic[pp_rank]))

    @property
    def fits(self) -> bool:
        """Whether every rank's peak fits the device; of hosts :attr:`HostMemory.fits` tells."""
        return self.worst.peak <= self.hardware.usable

    @property
    def fits_everywhere(self) -> bool:
        """Whether the run has the memory that it takes, on devices and on hosts."""
        return self.fits and self.host.fits

    @property
    def tokens_per_second(self) -> float:
        """Of a step, in :attr:`phase`."""
        return self.data.tokens_per_step / self.time.seconds

    @property
    def run_tokens_per_second(self) -> float:
        """The mean over the steps of the whole run, with all of its phases."""
        return self.data.tokens / self.seconds if self.phases else self.tokens_per_second

    @property
    def run_flops(self) -> float:
        """Model FLOPs of a token, the mean over the run: phases may have sequences of other lengths."""
        if not self.phases:
            return self.flops.model
        return sum(each.tokens * each.flops_per_token for each in self.phases) / self.data.tokens

    def tflops(self, *, causal: bool = True) -> float:
        """Model TFLOP/s of one device, further tokens (MTP) included."""
        flops = self.flops.model if causal else self.flops.non_causal + self.flops.mtp
        return self.tokens_per_second * flops / self.ranks / 1e12

    @property
    def flops_by_part(self) -> Mapping[str, float]:
        """FLOPs of a token by what computes them: they add up to the model's."""
        f, p = self.flops, self.parameters
        experts = 6.0 * (p.by_kind["experts"] - (p.total - p.active))  # of those that a token is sent to
        other = f.matmul - f.head - experts
        return {"attention": f.attention, "experts": experts, "head": f.head, "other": other, "mtp": f.mtp}

    @property
    def hardware_tflops(self) -> float:
        """What one device computes, activation checkpointing included: HFU's numerator."""
        return self.executed * self.tokens_per_second / self.ranks / 1e12

    @property
    def executed(self) -> float:
        """FLOPs that are executed for a token: attention's masked half left out."""
        total = 0.0
        for pp_rank in range(self.stages.pp):
            for phase in phases_of(self.stages, pp_rank):
                total += sum(phase.gemm_flops.values()) - phase.attention_flops / 2
        return total * self.ranks / self.stages.pp / self.stages.tokens

    @property
    def peak_tflops(self) -> float:
        """What MFU is a share of: the peak of bfloat16, or of float32 where that is multiplied."""
        return self.hardware.peak(self.unit) / 1e12

    @property
    def unit(self) -> str:
        """The dtype that MFU's peak is of."""
        kinds = {"fp32": "float32", "fp64": "float64"}
        return kinds.get(self.recipe.precision.use, "bfloat16")

    @property
    def seconds(self) -> float:
        """Of the whole run, without evaluations and checkpoints."""
        if self.phases:
            return sum(phase.seconds for phase in self.phases)
        return self.time.seconds * self.recipe.run.steps


def make_plan(
    recipe: Recipe, registry: Registry, layout: Layout, hardware: Hardware, *, processes: int = 1
) -> Plan:
    """Take a dry step of a checked recipe, of its phase with the largest microbatches, and add everything up.

    Args:
        recipe: checked, of the world size to plan.
        registry: the plugins.
        layout: of that many ranks.
        hardware: what the ranks run on.
        processes: that take dry steps at the same time, at most.

    Raises:
        NanotrainError: a component does something that cannot be followed without numbers.
    """
    remembering: Any = RememberedSchedules(registry)
    capability = hardware.capability
    try:
        now = PhaseTimeline(recipe).largest()
        stages = dry_stages(now, remembering, layout, host=hardware.gloo, processes=processes)
    except (NotImplementedError, RuntimeError) as problem:
        text = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        raise NanotrainError(f"{NO_PLAN}{text}") from problem
    phases = PhaseStages(stages, remembering, hardware)
    highest = highest_memory(recipe, stages, phases.of, phases.schedule)
    links = Links(hardware, layout)
    timer = Timer(stages, hardware, links.time)
    parameters = count_parameters(recipe, registry)
    return Plan(
        recipe=recipe,
        layout=layout,
        hardware=hardware,
        stages=stages,
        parameters=parameters,
        flops=count_flops(now, registry),
        memory=highest.ranks,
        memory_phase=highest.phase,
        phase=planned_phase(recipe, now),
        time=step_time(stages, hardware, links.time),
        phases=run_phases(recipe, registry, phases, links.time),
        traffic={pp_rank: traffic(stages, pp_rank, links, timer.excess) for pp_rank in sorted(stages.steps)},
        checkpoints=checkpoints(recipe, registry, stages, hardware),
        data=data_use(recipe, registry),
        host=host_memory(recipe, registry, stages, hardware, highest),
        assumptions=assumptions(recipe, remembering, stages, hardware, parameters),
        refusals=gpu_refusals(recipe, registry, layout, capability) if capability else [],
    )


# --- as JSON --------------------------------------------------------------------------------------


def to_json(plan: Plan) -> dict[str, Any]:
    """Return what ``--json`` prints. Sizes are bytes, times seconds; docs/planning.md lists the keys."""
    time, worst = plan.time, plan.worst
    told = {like: [attrs.asdict(each) for each in found] for like, found in plan.traffic.items()}
    return {
        "version": VERSION,
        "recipe": plan.recipe.run.name,
        "ranks": plan.ranks,
        "layout": plan.layout.sizes,
        "hardware": attrs.asdict(plan.hardware),
        "refusals": list(plan.refusals),
        "assumptions": list(plan.assumptions),
        "parameters": {**attrs.asdict(plan.parameters), "per_rank": _per_rank(plan)},
        "flops_per_token": {
            **attrs.asdict(plan.flops),
            "by_part": plan.flops_by_part,
            "causal": plan.flops.causal,
            "non_causal": plan.flops.non_causal,
            "model": plan.flops.model,
            "executed": plan.executed,
        },
        "memory": {
            "fits": plan.fits,
            "usable": round(plan.hardware.usable),
            "peak": worst.peak,
            "pp_rank": worst.pp_rank,
            "where": worst.where,
            "phase": plan.memory_phase,
            "ranks": [
                {
                    "pp_rank": rank.pp_rank,
                    "peak": rank.peak,
                    "where": rank.where,
                    "in_flight": rank.in_flight,
                    "at_peak": dict(rank.held),
                    "between_steps": dict(rank.state),
                }
                for rank in plan.memory
            ],
            "activations": [
                {"stage": stage, **attrs.asdict(each)}
                for stage in plan.stages.stages_of(worst.pp_rank)
                for each in activations(plan.stages, stage).tensors
            ],
            "activations_by_stage": [
                {
                    "bytes": each.bytes,
                    "recomputable": each.recomputable,
                    "layers": each.layers,
                    **attrs.asdict(each),
                }
                for each in activations_by_stage(plan.stages)
            ],
        },
        "collectives": {
            "pp_rank": plan.loudest,
            "of_a_step": told[plan.loudest],
            "ranks": [
                {"pp_rank": pp_rank, "of_a_step": told[like]} for pp_rank, like in enumerate(plan.stages.like)
            ],
        },
        "pipeline": {
            "stages": [attrs.asdict(part) for part in plan.stages.parts],
            "microbatches": plan.stages.microbatches,
            "bubble": time.bubble,
            "seconds": time.pipeline,
        },
        "time": {
            "phase": plan.phase,
            "step": time.seconds,
            "after_backward": time.after,
            "busiest": attrs.asdict(time.busiest),
            "tokens_per_second": plan.tokens_per_second,
            "tokens_per_second_per_device": plan.tokens_per_second / plan.ranks,
            "model_tflops_per_device": plan.tflops(),
            "mfu": plan.tflops() / plan.peak_tflops,
            "mfu_non_causal": plan.tflops(causal=False) / plan.peak_tflops,
            "hfu": plan.hardware_tflops / plan.peak_tflops,
            "mfu_peak": plan.unit,
            "run": plan.seconds,
            "device_hours": plan.seconds * plan.ranks / 3600,
        },
        "phases": [attrs.asdict(phase) for phase in plan.phases],
        "checkpoints": attrs.asdict(plan.checkpoints),
        "data": {
            **attrs.asdict(plan.data),
            "position": {
                **attrs.asdict(plan.data.position),
                "epoch": plan.data.position.epoch,
                "sequence": plan.data.position.sequence,
            },
        },
        "host_memory": {**attrs.asdict(plan.host), "total": plan.host.total, "fits": plan.host.fits},
    }


def _per_rank(plan: Plan) -> dict[str, int]:
    held = [sum(plan.stages.step_of(rank).parameters.values()) for rank in range(plan.stages.pp)]
    return {"min": min(held), "max": max(held)}


def largest(found: Sequence[Activation], number: int | None = None) -> list[Activation]:
    """Return so many tensors that take most (None: all), those of layers that are alike as one."""
    alike: dict[Activation, int] = {}
    for each in found:
        parts = ["*" if part.isdigit() else part for part in each.module.split(".")]
        key = attrs.evolve(each, module=".".join(parts), count=0)
        alike[key] = alike.get(key, 0) + each.count
    summed = [attrs.evolve(each, count=count) for each, count in alike.items()]
    return sorted(summed, key=lambda each: -each.bytes * each.count)[:number]
