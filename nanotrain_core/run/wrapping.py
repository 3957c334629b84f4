"""Applies the recipe's parallel wrappers to a rank's model parts, and validates what they return."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import attrs
from torch import nn

from nanotrain_core.contracts import Parallel
from nanotrain_core.errors import PluginError
from nanotrain_core.layout.dtensors import read_dtensors
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import Placements, note_roles
from nanotrain_core.moe.routing import counting_routers
from nanotrain_core.recipe.tree import Selection
from nanotrain_core.run.split_conflicts import Splits
from nanotrain_core.run.validate_components import check_experts, check_per_head, check_routers, check_wrapped

Wrappers = Iterable[tuple[Selection, Parallel]]


def wrap(
    stages: dict[int, nn.Module], placements: Placements, mesh: Mesh, wrappers: Wrappers
) -> tuple[dict[int, nn.Module], frozenset[str]]:
    """Return the stages as the wrappers leave them, in the recipe's order, and the names of the parameters
    that the model trains and a wrapper has frozen; update ``placements``.

    These keep their values. What the model itself builds without a gradient is state that training changes by
    other means, and ``balance`` of a counting router may change any parameter of it that is not trained.
    """
    trained = _trained(stages.values())
    splits = Splits(stages.values(), placements)
    for selection, wrapper in wrappers:
        stages = {stage: wrapper.apply(part, placements, mesh) for stage, part in stages.items()}
        check_wrapped(selection, stages.values(), placements)
        splits.check(selection.use, stages.values(), placements)
    note_roles(stages.values(), placements)
    check_per_head(stages.values(), placements)
    check_experts(stages.values(), mesh)
    check_routers(stages.values(), mesh)
    routers = counting_routers(stages.values()).items()
    balanced = {f"{name}.{key}" for name, router in routers for key, _ in router.named_parameters()}
    return stages, trained - _trained(stages.values()) - balanced


def _trained(parts: Iterable[nn.Module]) -> frozenset[str]:
    return frozenset(name for part in parts for name, each in part.named_parameters() if each.requires_grad)


def share_between_stages(placements: Placements, parts: Iterable[nn.Module], mesh: Mesh) -> Placements:
    """Record which parameters several pipeline ranks hold, such as a tied embedding. Collective along pp.

    Raises:
        PluginError: they are no copies of one parameter.
    """
    named = {name: each for part in parts for name, each in part.named_parameters()}
    own = {n: (placements[n].global_shape, p.requires_grad) for n, p in named.items() if n in placements}
    held = mesh.gather(own, "pp") if "pp" in mesh.layout.dims else [own]
    for name, like in own.items():
        holders = tuple(rank for rank, theirs in enumerate(held) if name in theirs)
        other = next((rank for rank in holders if held[rank][name] != like), None)
        if other is not None:
            forms = (
                f"{shape}, {'trained' if trained else 'frozen'}"
                for shape, trained in (held[other][name], like)
            )
            raise PluginError(
                f"{name} is {' on one pipeline rank, and '.join(forms)} on another: under one name they hold "
                "copies of one parameter; expected equal shapes, all trained or all frozen, or other names"
            )
        if len(holders) > 1:
            placements[name] = attrs.evolve(placements[name], stages=holders)
    return placements


def shard(parts: Collection[nn.Module], placements: Placements, mesh: Mesh, wrappers: Wrappers) -> None:
    """Let the wrappers shard parameters of finished parts, and update ``placements``."""
    for selection, wrapper in wrappers:
        for part in parts:
            wrapper.shard(part, placements, mesh)
        try:
            read_dtensors(parts, placements, mesh.layout)
        except ValueError as problem:
            raise PluginError(f"parallel '{selection.use}': {problem}") from None
        check_wrapped(selection, parts, placements)
    share_between_stages(placements, parts, mesh)  # again, for parameters that wrappers added
