"""What a rank holds and sends in a step: as planned, and as it happens on gloo, recorded at the same seam."""

from __future__ import annotations

from nanotrain_plan.dry.real import StepRecord, predict, real_recipe, record_step
from nanotrain_plan.memory import rank_memory
from nanotrain_plan.stages import dry_stages

from nanotrain_core.api import PhaseTimeline
from nanotrain_core.testing import run_ranks


def happened(case) -> list[StepRecord]:
    """Return the second step of each rank of a run."""
    return run_ranks(_happened, case.world_size, case)


def _happened(case) -> StepRecord:
    registry = case.registry()
    return record_step(real_recipe(case.recipe(), registry), registry)


def planned(case) -> list[StepRecord]:
    """Return the planned step of each rank."""
    recipe, registry = case.recipe(), case.registry()
    return predict(recipe, registry, registry.build(recipe.topology).layout(recipe.run.ranks))


def planned_memory(case) -> dict[tuple[int, ...], tuple[int, int]]:
    """Return, by the ranks of each pipeline rank, their peak and what is left between steps, above what
    is composed.
    """
    recipe, registry = PhaseTimeline(case.recipe()).largest(), case.registry()
    layout = registry.build(recipe.topology).layout(recipe.run.ranks)
    stages = dry_stages(recipe, registry, layout, host=True)
    found = {}
    for pp_rank in range(stages.pp):
        memory, step = rank_memory(stages, pp_rank), stages.step_of(pp_rank)
        alike = (rank for rank in range(layout.world_size) if layout.coordinate(rank, "pp") == pp_rank)
        composed = sum(step.state.values())
        found[tuple(alike)] = memory.peak - composed, sum(memory.state.values()) - composed
    return found
