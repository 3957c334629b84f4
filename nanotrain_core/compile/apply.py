"""Compiles what a recipe asks for: layers, and the loss of a chunk with its gradient."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from torch import nn

from nanotrain_core.compile.blocks import compile_blocks
from nanotrain_core.compile.cuda_graphs import not_captured
from nanotrain_core.compile.eager import describe_compiled, kept_eager, refused
from nanotrain_core.compile.loss import compile_losses
from nanotrain_core.compile.options import compiler_options, is_compiled
from nanotrain_core.errors import Problem, RecipeError
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import Placements
from nanotrain_core.layout.roles import Role
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.recipe.tree import Recipe
from nanotrain_core.registry.registry import Registry


def compile_parts(
    parts: Collection[nn.Module],
    recipe: Recipe,
    registry: Registry,
    mesh: Mesh,
    placements: Placements,
    passes: Passes,
) -> Sequence[str]:
    """Compile layers and losses of ``parts`` if the recipe requests it; return a description of them.

    Raises:
        RecipeError: nothing would be compiled by ``run.compile = true``, or something cannot be captured by
            ``run.cuda_graphs``.
    """
    device = mesh.device.type
    if device != "meta":  # a dry run of what runs on a GPU
        _reject(not_captured(recipe, registry, mesh.layout, device))
    if not is_compiled(recipe, device):
        return ()
    kept, backend = kept_eager(recipe, registry, mesh.layout, device), recipe.run.compile_backend
    _reject(refused(recipe, kept))
    eager = {each.role for each in kept}
    options = compiler_options(backend, placements.values(), mesh.layout)
    if Role.BLOCK not in eager:
        compile_blocks(parts, backend, eager=eager, options=options, passes=passes, log=mesh.rank == 0)
    if Role.HEAD not in eager:
        compile_losses(parts, backend, options=options, log=mesh.rank == 0)
    return describe_compiled(backend, kept)


def _reject(problems: Iterable[Problem]) -> None:
    found = [f"{problem.key}: {problem.message}" for problem in problems]
    if found:
        raise RecipeError(found)
