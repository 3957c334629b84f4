"""Builds the parts of the model that a rank owns: their modules, wrappers, precision, kernels and weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import nn

from nanotrain_core.contracts import Kernels, Model, Precision
from nanotrain_core.errors import PluginError, expect_result
from nanotrain_core.hf.load_weights import saved_weights
from nanotrain_core.layout.initialization import equalize, materialize, replace_parameter
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.meta_device import meta_device
from nanotrain_core.layout.placement import PlacedParameter, Placement, Placements, place, placed_parameters
from nanotrain_core.layout.roles import Role, tagged
from nanotrain_core.models.ops import TORCH_OPS, Ops, wrap_ops
from nanotrain_core.pipeline.actions import Part
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.precision.gemm import GEMMBackend, gemm_parameters, gemms_of, use_gemm
from nanotrain_core.precision.quantized_storage import PackedWeight, Packing
from nanotrain_core.recipe.tree import Recipe
from nanotrain_core.registry.contract_checks import check_part
from nanotrain_core.registry.registry import Registry
from nanotrain_core.run.components import Components
from nanotrain_core.run.memory import expect_weights_to_fit
from nanotrain_core.run.validate_components import check_converted, placed_by
from nanotrain_core.run.wrapping import shard, share_between_stages, wrap


def wrapped_stages(
    built: Components, recipe: Recipe, parts: Sequence[Part], mesh: Mesh
) -> tuple[dict[int, nn.Module], frozenset[str], Placements]:
    """Build this rank's parts of the model with the functions of the kernels, and let the wrappers transform
    them. Collective. See :func:`wrap` for what else is returned."""
    ops = expect_result(f"kernels '{built.kernels_name}'", "ops", built.kernels.ops(mesh.device), Ops)
    op_wrappers = [
        expect_result(f"parallel '{chosen.use}'", "op_wrappers", wrapper.op_wrappers(mesh), Mapping)
        for chosen, wrapper in built.wrappers
    ]
    ops = wrap_ops(ops, *op_wrappers)
    stages = build_stages(built.model, parts, mesh, ops)
    for part in stages.values():
        check_part(f"model '{recipe.model.use}'", part)
    placements = share_between_stages(place(stages.values(), mesh.layout), stages.values(), mesh)
    return *wrap(stages, placements, mesh, built.wrappers), placements


def build_stages(
    model: Model, parts: Sequence[Part], mesh: Mesh, ops: Ops = TORCH_OPS
) -> dict[int, nn.Module]:
    """Build this rank's parts of the model on ``meta``, numbered along the model."""
    rank = pipeline_rank(mesh)
    with meta_device():
        return {stage: model.build(part, ops) for stage, part in enumerate(parts) if part.rank == rank}


def with_precision_and_kernels(
    built: Components, stages: Mapping[int, nn.Module], mesh: Mesh, passes: Passes
) -> dict[int, nn.Module]:
    """Give the parts, still on ``meta``, the precision's dtypes and GEMM backends, then the kernels'."""
    converted = {stage: built.precision.convert(part) for stage, part in stages.items()}
    check_converted(converted.values())
    built.precision.check_parts(tuple(converted.values()), mesh)
    for part in converted.values():
        if passes.splits_backward or any(wrapper.splits_linear(mesh) for _, wrapper in built.wrappers):
            split_linear_layers(part, built.kernels.gemm(), passes)
        _apply(built.kernels_name, built.kernels, part, passes)
    return converted


def split_linear_layers(part: nn.Module, gemm: GEMMBackend, passes: Passes) -> None:
    """Give linear layers a GEMM backend, so that dgrad and wgrad are separate; experts only if the schedule
    has W passes.

    A wrapper overlaps the wgrads of linear layers only. Experts otherwise keep ``ops.experts``, on a GPU one
    grouped kernel.
    """
    for _, module, found in tagged(part):
        names = gemm_parameters(module)
        wanted = passes.splits_backward or found.role is not Role.EXPERTS
        if names and wanted and gemms_of(module) is None:
            use_gemm(module, dict.fromkeys(names, gemm), passes)


def _apply(use: str, kernels: Kernels, part: nn.Module, passes: Passes) -> None:
    """Apply the kernels; reject those that remove a precision's GEMM backend, such as FP8's, from a layer."""
    backends = {name: gemms_of(module) for name, module, _ in tagged(part)}
    kernels.apply(part, passes)
    for name, module, _ in tagged(part):
        before = backends.get(name)
        if before is not None and before.backends and gemms_of(module) is not before:
            raise PluginError(
                f"kernels '{use}': apply replaced the GEMM backend of {name}, set by the precision, a "
                "wrapper or the schedule: skip modules for which gemms_of(module) is not None"
            )


def with_weights(
    built: Components,
    recipe: Recipe,
    registry: Registry,
    stages: Mapping[int, nn.Module],
    placements: Placements,
    mesh: Mesh,
    weights: str | None,
) -> list[PlacedParameter]:
    """Allocate the parameters, and give them their initial weights or ``weights``, the same on all ranks that
    hold the same block; each is packed at once, if the precision stores it so. Collective."""
    parts = tuple(stages.values())
    _pack(parts, built.precision, recipe)
    shard(parts, placements, mesh, built.wrappers)
    expect_weights_to_fit(parts, placements, recipe, mesh)
    wrappers, on_meta = [each.config for each in recipe.parallel], placed_parameters(parts, placements)
    with saved_weights(weights, registry, recipe.model, wrappers, on_meta, mesh) as saved:
        materialize(parts, placements, recipe.run.seed, mesh.device, saved=saved)
    placed = placed_by(f"precision '{recipe.precision.use}'", parts, placements)
    spans = (Placement.sync_span, Placement.replica_span)
    mesh.agree_on_groups(span(p.placement, mesh.layout) for p in placed for span in spans)
    equalize(placed, mesh)
    return placed


def _pack(parts: Collection[nn.Module], precision: Precision, recipe: Recipe) -> None:
    """Replace the parameters that the precision stores packed by packed ones, on ``meta`` as they are.

    Raises:
        PluginError: what the precision returned is no format.
    """
    who = f"precision '{recipe.precision.use}'"
    for part in parts:
        for name, parameter in [*part.named_parameters()]:
            if parameter.numel() and (packing := precision.packing(name, parameter)) is not None:
                packing = expect_result(who, "packing", packing, Packing)
                packed = PackedWeight.like(parameter, packing)
                replace_parameter(part, name, nn.Parameter(packed, parameter.requires_grad))


def pipeline_rank(mesh: Mesh) -> int:
    """Return this rank's index among the pipeline ranks; 0 without a pipeline."""
    return mesh.coordinate("pp") if "pp" in mesh.layout.dims else 0
