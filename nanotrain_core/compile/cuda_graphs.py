"""Checks, before anything runs, whether microbatches can be replayed from a CUDA graph. Torch-free.

In a replay no Python code runs and every tensor keeps its address. A component's author declares with
:attr:`Component.cuda_graphs` whether it allows this; without a declaration, CUDA graphs are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from nanotrain_core.compile.eager import actions_of, explain_compiled, on_device
from nanotrain_core.component import NotCaptured
from nanotrain_core.errors import Problem
from nanotrain_core.layout.layout import Layout
from nanotrain_core.pipeline.actions import Action
from nanotrain_core.recipe.component_functions import call_declared
from nanotrain_core.recipe.replicas import replica_dims
from nanotrain_core.recipe.tree import Recipe, Selection
from nanotrain_core.registry.registry import Registry

#: Kinds whose components take part in forward and backward passes, or allocate weights or gradients.
KINDS = ("kernels", "model", "parallel", "precision", "optimizer")


def not_captured(
    recipe: Recipe, registry: Registry, layout: Layout, device: str | None = None
) -> Iterator[Problem]:
    """Yield what prevents ``run.cuda_graphs`` in a recipe that asks for it.

    Args:
        recipe: the checked recipe.
        registry: the plugins.
        layout: the layout of its ranks.
        device: type of the run's device; None: unknown.

    Raises:
        PluginError: a component's rule is wrong.
    """
    for each in _reasons(recipe, registry, layout, device) if recipe.run.cuda_graphs else ():
        yield Problem("run.cuda_graphs", f"{each.why}; expected {each.expected}")


def explain_passes(recipe: Recipe, registry: Registry, layout: Layout) -> list[str]:
    """Return what is compiled and what is captured, in lines for ``nanotrain check --explain``."""
    compiled = explain_compiled(recipe, registry, layout)
    if not recipe.run.cuda_graphs:
        return compiled
    return [
        *compiled,
        "CUDA graph: forward and backward of a microbatch; eager are the first ones, those of another shape, "
        "those in which monitors observe modules, and the last one if gradients are reduced during backward",
    ]


def _reasons(recipe: Recipe, registry: Registry, layout: Layout, device: str | None) -> Iterator[NotCaptured]:
    if device not in (None, "cuda"):
        yield NotCaptured(f"a CUDA graph needs an NVIDIA GPU, and this run is on '{device}'")
    if recipe.run.share_device:
        yield NotCaptured("ranks that share a GPU communicate through host memory")
    if recipe.run.compile_backend == "cudagraphs":
        yield NotCaptured('compile_backend = "cudagraphs" makes its own')
    replicas = replica_dims(recipe, layout)
    for dim in layout.dims:
        if dim not in replicas and layout.size(dim) > 1:
            what = f"topology.{dim} = {layout.size(dim)}"
            yield NotCaptured(f"{what}: passes that communicate are not captured")
    if not _in_turn(actions_of(recipe, registry, layout)[0]):
        use = recipe.schedule.use
        yield NotCaptured(f"schedule '{use}' does not run each microbatch forward and then backward")
    for selection in recipe.selections():
        if selection.kind in KINDS:
            yield from _of_component(selection, recipe, registry, layout, device)


def _in_turn(actions: Sequence[Action]) -> bool:
    """Return whether ``actions`` are F and B of one microbatch after the other, in one stage."""
    pairs = zip(actions[::2], actions[1::2], strict=False)
    return len(actions) % 2 == 0 and all(
        (f.kind, b.kind) == ("F", "B") and (f.stage, f.microbatch) == (b.stage, b.microbatch) and f.stage == 0
        for f, b in pairs
    )


def _of_component(
    selection: Selection, recipe: Recipe, registry: Registry, layout: Layout, device: str | None
) -> Iterator[NotCaptured]:
    selection = on_device(selection, registry, device or "cuda")
    who = f"{selection.kind} '{selection.use}'"
    if registry.get(selection.kind, selection.use).cuda_graphs is None:
        why = f"{who} does not declare that its passes can be captured (Component.cuda_graphs)"
        yield NotCaptured(why)
    for each in call_declared("cuda_graphs", selection, recipe, layout, registry, NotCaptured):
        yield attrs.evolve(each, why=f"{who}: {each.why}")
