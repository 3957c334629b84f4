"""What a rank holds and sends in a step: as planned, and as it happens on gloo, recorded at the same seam."""

from __future__ import annotations

from nanotrain_plan.dry.real import StepRecord, predict, real_recipe, record_step

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
