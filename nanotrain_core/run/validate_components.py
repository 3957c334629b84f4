"""Validates what components return while a run is composed against their contracts.

A violation is rejected with the component's name: otherwise the run would silently train on other tokens,
lose layers or count gradients twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import nn

from nanotrain_core.contracts import ChangesLength, Data, GathersWeights, GradientSync, Model
from nanotrain_core.contracts.data import RESERVED_KEYS
from nanotrain_core.errors import DataError, PluginError, did_you_mean
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import Piece, PlacedParameter, Placements, placed_parameters
from nanotrain_core.layout.roles import Role, overridden_by, shared_tokens, tagged
from nanotrain_core.phases.timeline import PhaseTimeline
from nanotrain_core.pipeline.actions import Costs
from nanotrain_core.recipe.tree import Recipe, Selection
from nanotrain_core.registry.contract_checks import expect_no_parameter_hooks, missing_of_part
from nanotrain_core.registry.registry import Registry

if TYPE_CHECKING:
    from nanotrain_core.compose import Run


def check_vocabulary(data: Data, model: Model, recipe: Recipe) -> None:
    if data.vocab_size > model.vocab_size:
        raise DataError(
            f"data '{recipe.data.use}' has {data.vocab_size} tokens but the model's vocabulary is "
            f"{model.vocab_size}: set the model's vocabulary to at least {data.vocab_size}"
        )


def expect_lengths(data: Data, recipe: Recipe) -> None:
    """Announce to the data, before it is opened, all lengths of its sequences, if phases change them."""
    lengths = PhaseTimeline(recipe).lengths()
    if len(lengths) == 1:
        return
    if not isinstance(data, ChangesLength):
        raise PluginError(
            f"data '{recipe.data.use}' provides changes_length, and has no expect_lengths(lengths) and "
            "set_length(length): see nanotrain_core.api.torch.ChangesLength"
        )
    data.expect_lengths(lengths)


def check_meta(data: Data, mesh: Mesh, recipe: Recipe) -> None:
    """Reject ranks that opened different data, which would silently train on it, and reserved keys."""
    meta = data.meta()
    if not isinstance(meta, Mapping) or RESERVED_KEYS & meta.keys():
        text = f"meta returned {meta!r}; expected a dict without {', '.join(sorted(RESERVED_KEYS))}"
        raise PluginError(f"data '{recipe.data.use}': {text}, which the core keeps there")
    prints = mesh.gather(str(meta.get("fingerprint")))
    for rank, found in enumerate(prints):
        if found != prints[0]:
            raise DataError(
                f"rank {rank} has other data than rank 0: its fingerprint is {found}, not {prints[0]}"
            )


def check_costs(costs: Costs, model: Model, recipe: Recipe) -> None:
    """Reject costs for other layers than the model's: stages are split by them, so layers would be lost."""
    if not isinstance(costs, Costs) or len(costs.layers) != model.layers or costs.total <= 0:
        raise PluginError(
            f"model '{recipe.model.use}': flops returned {str(costs)[:200]}; "
            f"expected Costs of {model.layers} layers, with a total of more than 0"
        )


def check_loss_weights(model: Model, recipe: Recipe) -> None:
    """Reject what gives no loss term a weight."""
    found = model.loss_weights
    if not isinstance(found, Mapping) or not found:
        raise PluginError(
            f"model '{recipe.model.use}': loss_weights is {str(found)[:200]}; expected the weight of each "
            'loss term by name, such as that of the next-token loss, {"lm": 1.0}'
        )


def check_first_step(run: Run, losses: Iterable[str], counts: torch.Tensor, *, done: int) -> None:
    """Reject losses and gradients that no later step would complain of; collective along the pipeline.

    Args:
        run: with the complete gradients of the step.
        losses: the terms that this rank's stages have returned.
        counts: of each term that has a weight, this rank's count in the step.
        done: steps that were validated before. Those after the first are not: a term that is first counted
            there and never returned is reported as 0.
    """
    if not done:
        check_terms(losses, run.loss_weights, counts, run.mesh)
        check_gradients(run.gradients)


def check_terms(losses: Iterable[str], loss_weights: Iterable[str], counts: torch.Tensor, mesh: Mesh) -> None:
    """Reject a loss term that was counted in a step and that no stage returned: it would be reported as 0.

    One with the count 0, such as that of images in batches of text, may be absent. Collective along the
    pipeline, where all ranks have the same counts.
    """
    own = {*losses}
    found = own.union(*mesh.gather(own, "pp")) if mesh.degree("pp") > 1 else own
    for name, count in zip(loss_weights, counts, strict=True):
        if name not in found and count > 0:
            returned = ", ".join(sorted(found)) or "none"
            raise PluginError(
                f"the model has a weight for the loss '{name}' and never returned that loss: "
                f"PartOutput.losses had {returned}{did_you_mean(name, sorted(found))}"
            )


def check_gradients(gradients: GradientSync) -> None:
    """Reject a gradient sync whose complete gradients are no tensors of their pieces' shapes."""
    for piece in gradients.pieces():
        found, wanted = gradients.gradient_of(piece), tuple(piece.weight.shape)
        shape = tuple(found.shape) if isinstance(found, torch.Tensor) else None
        if shape != wanted:
            what = f"a {type(found).__name__}" if shape is None else f"a tensor of shape {shape}"
            raise PluginError(
                f"gradient sync {type(gradients).__name__}: gradient_of returned {what} for {piece.name}; "
                f"expected a tensor of the shape of piece.weight, {wanted}"
            )


def check_converted(parts: Iterable[nn.Module]) -> None:
    """Reject what a precision returned in place of a part of the model, such as None for lack of a return."""
    for part in parts:
        if missing_of_part(part):
            raise PluginError(
                f"the precision's convert returned a {type(part).__name__}, which is no model part: return "
                "the part that it was given, or a module with its initializer(name) and constant(name)"
            )


def check_wrapped(selection: Selection, parts: Iterable[nn.Module], placements: Placements) -> None:
    """Reject the result of a parallel wrapper if it does not match the placements it left."""
    for part in parts:
        if missing := missing_of_part(part):
            passed = " and ".join(f"{name}(name)" for name in missing)
            raise PluginError(
                f"parallel '{selection.use}': apply returned a {type(part).__name__}, which is no model "
                f"part: return the part, or a module that passes its {passed} on"
            )
        expect_no_parameter_hooks(f"parallel '{selection.use}'", part)
    placed_by(f"parallel '{selection.use}'", parts, placements)


def placed_by(who: str, parts: Iterable[nn.Module], placements: Placements) -> list[PlacedParameter]:
    """Return parameters with their placements; reject those that do not match their placement."""
    try:
        return placed_parameters(parts, placements)
    except ValueError as problem:
        raise PluginError(f"{who}: {problem}") from None


def check_per_head(parts: Iterable[nn.Module], placements: Placements) -> None:
    """Reject a per-head parameter that is replicated where a wrapper has sharded the heads next to it.

    The heads are those of the COLUMNs beside it with as many units as it has, or of all if none has: key
    heads that several ranks use are whole, as is what there is for each of them.
    """
    for part in parts:
        columns: dict[str, list[tuple[int, frozenset[str]]]] = {}
        for name, _, found in tagged(part):
            if found.role is Role.COLUMN:
                weight = placements[f"{name}.weight"]
                units = (weight.global_shape[0] // found.unit, weight.sharded)
                columns.setdefault(name.rpartition(".")[0], []).append(units)
        for name, module, found in (each for each in tagged(part) if each[2].role is Role.PER_HEAD):
            apart = tuple(f"{inner}." for inner, _, _ in tagged(module) if inner)  # of other roles
            beside = columns.get(name.rpartition(".")[0], [])
            for key, _ in (*module.named_parameters(), *module.named_buffers()):
                placed = placements[f"{name}.{key}"]
                entries = prod(placed.global_shape[:1]) // found.unit
                alike = [sharded for units, sharded in beside if units == entries]
                needed = frozenset().union(*(alike or (sharded for _, sharded in beside)))
                missing = needed - placed.sharded
                if missing and not key.startswith(apart):
                    raise PluginError(
                        f"{name}.{key} has an entry for each head, and is whole along {min(missing)}, where "
                        "the heads beside it are split: expected a wrapper that knows the role PER_HEAD"
                    )


def check_ranges(gradients: GradientSync, optimizer: object, recipe: Recipe, registry: Registry) -> None:
    """Reject a gradient sync that returns no pieces, or ranges that no rank would gather after a step."""
    pieces = gradients.pieces()
    if not isinstance(pieces, Sequence) or not all(isinstance(each, Piece) for each in pieces):
        raise PluginError(
            f"gradient sync {type(gradients).__name__}: pieces returned {str(pieces)[:200]}; expected a list "
            "of the nanotrain_core.api.torch.Piece whose gradients this rank completes"
        )
    if gradients is optimizer or isinstance(gradients, GathersWeights):
        return
    ranges = [piece.name for piece in pieces if piece.span is not None]
    if ranges:
        syncs = [s.use for s in recipe.parallel if "gradient_sync" in registry.get(s.kind, s.use).provides]
        name = syncs[0] if syncs else type(gradients).__name__
        raise PluginError(
            f"gradient sync '{name}' hands out a range of {ranges[0]}, and has no gather_weights() and "
            "wait(parameters), which bring updated ranges to all ranks: see "
            "nanotrain_core.api.torch.GathersWeights"
        )


def check_dtensors(placed: Iterable[PlacedParameter], gradients: GradientSync) -> None:
    """Reject a gradient sync that would never find the gradients of DTensors, which are stored elsewhere."""
    found = next((each for each in placed if each.dtensor is not None), None)
    if found is not None and not gradients.reads_dtensors:
        raise PluginError(
            f"parameter {found.placement.name} is a DTensor, and {type(gradients).__name__}, the run's "
            "gradient sync, reads no gradients of DTensors: expected the wrapper that makes them to provide "
            "gradient_sync, and to have reads_dtensors = True"
        )


def check_experts(parts: Iterable[nn.Module], mesh: Mesh) -> None:
    """Reject experts that several ranks call with the same tokens: their gradients would be counted twice."""
    layout = mesh.layout
    alike = {*layout.views["dense"].dims} - {"pp", *layout.data_dims}
    alike = {dim for dim in alike if mesh.size(dim) > 1}
    for part in parts:
        for name, module, found in tagged(part):
            missing = alike - shared_tokens(module) if found.role is Role.EXPERTS else set()
            if missing:
                dim = min(missing)
                raise PluginError(
                    f"{name}: all ranks along {dim} would send the same tokens to these experts. The wrapper "
                    f"that handles {dim} must give each a share of them, and say so with "
                    "nanotrain_core.api.share_tokens"
                )


def check_routers(parts: Iterable[nn.Module], mesh: Mesh) -> None:
    """Reject routers that see parts of sequences: balance losses need whole sequences, not sums of parts."""
    dims = [dim for dim in mesh.layout.sequence_dims if mesh.size(dim) > 1]
    for part in parts if dims else ():
        for name, module, found in tagged(part):
            if found.role is Role.ROUTER and overridden_by(module) is None:
                raise PluginError(
                    f"{name}: each rank along {dims[0]} would route its part of each sequence, and balance "
                    f"losses are of whole ones. The wrapper that handles {dims[0]} must make sequences whole "
                    "for the router, with nanotrain_core.api.override_forward, or refuse models with "
                    "experts in Component.check"
                )
