"""Refuses parameters and forwards that one parallel wrapper gives a layer and another splits unawares.

A wrapper may add a parameter to a layer, whole on every rank with the same gradient on all, or take over its
forward. Beside the blocks of a split layer neither is what one process has: hooks of a ROW see partial sums,
those of a COLUMN some of the outputs, so that gradients of parameters that these read are partial.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Set
from typing import TYPE_CHECKING

from nanotrain_core.errors import PluginError
from nanotrain_core.layout.placement import Placement, Placements
from nanotrain_core.layout.roles import Role, added_by, note_added, tagged, taken_over_by

if TYPE_CHECKING:
    from torch import nn

    Parts = Collection[nn.Module]

#: Roles of layers that a wrapper may split: each rank has some of the outputs, or of the terms of a sum.
SPLIT = (Role.VOCAB, Role.COLUMN, Role.ROW, Role.HEAD)


class Splits:
    """Follows, from wrapper to wrapper, what each adds to which layer, and which layers it splits."""

    def __init__(self, parts: Parts, placements: Placements) -> None:
        self._before = dict(placements)
        self._taken = {name: "" for name, module, _ in layers(parts) if taken_over_by(module)}
        """Layers whose forward was taken over, and by which wrapper; empty: by the model."""

    def check(self, use: str, parts: Parts, placements: Placements) -> None:
        """Refuse what ``use``, which was just applied, splits unawares, or adds unawares to what is split.

        Raises:
            PluginError: its text names the parameter or layer, the wrappers, and what to do.
        """
        for name, module, role in layers(parts):
            named = [(f"{name}.{key}", each) for key, each in module.named_parameters(recurse=False)]
            own = [n for n, parameter in named if n in self._before and not added_by(parameter)]
            earlier = {dim for n in own for dim in blocks(self._before[n], role)}
            split = {dim for n in own for dim in blocks(placements[n], role)} - earlier
            if split:
                self._check_forward(use, name, min(split))
            for key, parameter in module.named_parameters():
                placed = placements[f"{name}.{key}"]
                if placed.name in self._before:
                    self._check_earlier(use, placed, added_by(parameter), split, module, role)
                elif parameter.requires_grad and role is Role.COLUMN:
                    check_addition(use, placed, earlier)
        self._follow(use, parts, placements)

    def _check_forward(self, use: str, layer: str, dim: str) -> None:
        if by := self._taken.get(layer):
            raise PluginError(
                f"parallel '{use}' splits {layer} over {dim}, and '{by}' has taken over its forward, which "
                "would compute with one rank's block of the weight: expected a module around it, or "
                f"'{by}' after '{use}', made for the blocks that placements record"
            )

    def _check_earlier(
        self, use: str, placed: Placement, by: str, split: Set[str], module: nn.Module, role: Role
    ) -> None:
        """Check what the wrapper ``by`` had added to a layer; nothing if it is the model's own."""
        if role is not Role.COLUMN:
            placed = self._before[placed.name]
        elif changes_input_only(module):
            return
        # Outputs of a COLUMN are some of those of one process: what `use` has marked as partial is right.
        if by and (whole := split & placed.same):
            raise PluginError(
                f"parallel '{use}' splits a {role.name} over {min(whole)}, to which '{by}' has added "
                f"{placed.name}, placed as whole, with equal gradients on all ranks: beside one rank's block "
                f"it has another. List '{by}' after '{use}'"
            )

    def _follow(self, use: str, parts: Parts, placements: Placements) -> None:
        for part in parts:
            for name, parameter in part.named_parameters():
                if name not in self._before:
                    note_added(parameter, use)
        for name, module, _ in layers(parts):
            if taken_over_by(module):
                self._taken.setdefault(name, use)
        self._before = dict(placements)


def check_addition(use: str, placed: Placement, split: Set[str]) -> None:
    """Check what ``use`` added to a COLUMN that another wrapper has split."""
    if whole := split & placed.same:
        raise PluginError(
            f"parallel '{use}' adds {placed.name} to a COLUMN that is split over {min(whole)}: the gradient "
            "on each rank is that of its own outputs. Expected a placement split as the weight's rows, "
            f"or, if every rank has all of it, .sum_over('{min(whole)}')"
        )


def blocks(placed: Placement, role: Role) -> frozenset[str]:
    """Return over what a layer's parameter is split; of a COLUMN also where ranks use some of its outputs."""
    return placed.sharded | placed.summed if role is Role.COLUMN else placed.sharded


def layers(parts: Parts) -> Iterator[tuple[str, nn.Module, Role]]:
    """Yield the modules with a role of :data:`SPLIT`."""
    for part in parts:
        yield from ((name, module, tag.role) for name, module, tag in tagged(part) if tag.role in SPLIT)


def changes_input_only(module: nn.Module) -> bool:
    """Return whether what was added to a COLUMN can only act on its input, which ranks have whole."""
    return not module._forward_hooks and taken_over_by(module) is None
