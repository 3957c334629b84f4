"""What the numbers of a plan rest on, in words."""

from __future__ import annotations

import os
from collections import Counter

from nanotrain_core.api import Recipe, Registry, Role, kept_eager
from nanotrain_plan.budget import offloads_state
from nanotrain_plan.comms import Links
from nanotrain_plan.dry.cost import ATTENTION
from nanotrain_plan.hardware import LOW_PRECISION, Hardware
from nanotrain_plan.model import Parameters
from nanotrain_plan.number_format import size
from nanotrain_plan.stages import Stages

#: An assumption, whose reason follows.
STAY_EAGER = "layers are timed as compiled, but stay eager"


def assumptions(
    recipe: Recipe, registry: Registry, stages: Stages, hardware: Hardware, parameters: Parameters
) -> list[str]:
    """Return what the numbers rest on, for people to read."""
    a, o, links = hardware.achieved, hardware.overlap, hardware.links
    eager, domain = not stages.compiled, "an NVLink domain" if links.domain else "a node"
    found = [
        f"GEMMs reach {a.gemm:.0%} of the peak ({_gemm_rates(stages, hardware)}), "
        f"attention {a.attention:.0%}, causal: half of the scores are left out",
        f"other operators move {hardware.memory.bandwidth_gb_s:g} GB/s x {a.memory:g}"
        + (f", {hardware.memory.fusion:g} times less traffic by torch.compile" if not eager else ""),
        f"links reach {links.achieved:.0%} of {links.intra_gb_s:g} GB/s within {domain} of "
        f"{hardware.domain} and {links.inter_gb_s:g} GB/s between {domain.split(' ', 1)[1]}s; "
        f"{links.latency_us:g} us latency; collectives are hidden: dp {o.dp:.0%}, tp {o.tp:.0%}, "
        f"ep {o.ep:.0%}, cp {o.cp:.0%}, pp {o.pp:.0%}",
        *(["experts get equally many tokens"] if parameters.by_kind["experts"] else []),
        f"the host takes {hardware.launch_us:g} us to launch an operator"
        + (f", and torch.compile leaves one of {hardware.memory.fusion:g}" if not eager else "")
        + "; a device that is faster waits for it"
        + (", but not in passes that a CUDA graph replays" if stages.captured else ""),
        f"{hardware.reserved_gb:g} GB of {hardware.memory_gb:g} are not the run's; tensors without an "
        "allocator's rounding and fragmentation",
    ]
    passes = [phase for step in stages.steps.values() for phase in step.measured.values()]
    if any(map(Links(hardware, stages.layout).ring, passes)):
        found.append("messages between ranks that share sequences are hidden while a pass computes attention")
    moved = max(phase.host for phase in passes)
    if moved:
        found.append(
            f"{size(moved)} of a microbatch's activations go to the host and back beside the computation"
        )
    if offloads_state(recipe):
        found.append("the optimizer's update on the host, and its copies over PCIe, are not counted in time")
    if getattr(recipe.data.config, "mask_documents", False) and not hardware.gloo:
        found.append(
            "attention is causal: mask_documents' mask over each sequence's scores, kept where a GPU has no "
            "kernel for documents, and the work that it adds are not counted"
        )
    if getattr(recipe.model.config, "window", 0) and not hardware.gloo:
        found.append(
            "sliding-window attention has FlashAttention's kernel, for 16-bit numbers on Ampere or later; "
            "elsewhere it computes up to twice as many scores, and is slower"
        )
    if hardware.cores:
        ranks = min(recipe.run.ranks, hardware.devices_per_node)
        found.append(
            f"each rank has {hardware.cores} cores for itself, {ranks * hardware.cores} in all on a host; "
            f"this machine has {os.cpu_count()}"
        )
    if recipe.run.cuda_graphs:
        found.append("memory that a CUDA graph keeps for itself, activations of a microbatch, is not counted")
    if not eager:
        found.append("activations are those of eager layers: torch.compile keeps as many or fewer")
        kept = kept_eager(recipe, registry, stages.layout, "cuda")
        found += [f"{STAY_EAGER}: {each}" for each in kept if each.role is Role.BLOCK]
    return found


def _gemm_rates(stages: Stages, hardware: Hardware) -> str:
    """Return what GEMMs of each dtype of a step reach, that with most FLOPs first."""
    flops = Counter[str]()
    for step in stages.steps.values():
        for phase in (*step.measured.values(), *step.around.values()):
            flops.update({k: n for k, n in phase.gemm_flops.items() if n and not k.startswith(ATTENTION)})
    told = []
    for number, (kind, _) in enumerate(flops.most_common()):
        unit = "" if number else " TFLOP/s"
        rate = f"{hardware.rate(kind) / 1e12:.4g}{unit} in {LOW_PRECISION.get(kind, kind)}"
        stands = f", which the device has no units for: as {hardware.kind_of(kind)}"
        told.append(rate + (stands if hardware.kind_of(kind) != kind else ""))
    return ", ".join(told)
