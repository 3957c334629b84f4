"""Whether a run is compiled, and what follows from it for the compiler and for process groups."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from nanotrain_core.layout.layout import Layout
from nanotrain_core.layout.placement import Placement
from nanotrain_core.recipe.tree import Recipe
from nanotrain_core.watch.hang import PATIENCE


def is_compiled(recipe: Recipe, device: str) -> bool:
    """Return whether ``run.compile`` compiles layers on a device of this type."""
    wanted = recipe.run.compile
    return bool(wanted) if wanted != "auto" else device == "cuda" and not recipe.run.share_device


def group_timeout(recipe: Recipe, device: str) -> timedelta:
    """Return the timeout of process groups.

    It is longer if pipeline stages are compiled: one is compiled after the other, each when its first input
    arrives. Meanwhile the last stage waits in its first receive, where NCCL would end the run. The hang
    detector makes an exception only for the first step, and applies ``run.hang_timeout`` to all others.
    """
    slow = is_compiled(recipe, device) and device == "cuda" and recipe.run.ranks > 1
    return timedelta(seconds=recipe.run.timeout * (PATIENCE if slow else 1))


def compiler_options(backend: str, placements: Iterable[Placement], layout: Layout) -> dict[str, Any]:
    """Return the options of ``torch.compile``.

    Inductor benchmarks configurations of a reduction in each process separately, and configurations differ in
    their order of summation. If several ranks each compute the same gradient (``Placement.same``: norms and
    routers under tensor parallelism), their copies of the weight would drift apart. Inductor's deterministic
    mode chooses without benchmarks. Source: ``torch._inductor.config.deterministic``.
    """
    if backend != "inductor" or all(layout.size(*sorted(each.same)) == 1 for each in placements):
        return {}
    return {"deterministic": True}
