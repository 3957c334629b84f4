"""Refuses parameters and forwards that one parallel wrapper gives a layer and another splits unawares.

A wrapper may add a parameter to a layer, whole on every rank with the same gradient on all, or take over its
forward. Beside the blocks of a split layer neither is what one process has: hooks of a ROW see partial sums,
those of a COLUMN some of the outputs, so that gradients of parameters that these read are partial.

Which hook reads which parameter is not known. What may be right is not refused: weights of replicas that
drift apart are reported when they are saved.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Set
from typing import TYPE_CHECKING

import attrs

from nanotrain_core.errors import PluginError
from nanotrain_core.layout.placement import Placement, Placements
from nanotrain_core.layout.roles import Role, added_by, note_added, overridden_by, tagged

if TYPE_CHECKING:
    from torch import nn

    Parts = Collection[nn.Module]

#: Roles of layers that a wrapper may split: each rank has some of the outputs, or of the terms of a sum.
SPLIT = (Role.VOCAB, Role.COLUMN, Role.ROW, Role.HEAD)


@attrs.frozen
class Call:
    """What runs when a module is called: its forward, and the keys of its hooks in order."""

    forward: object
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Call:
        """Return what runs now."""
        forward = (type(module), overridden_by(module))
        return cls(forward, tuple(module._forward_pre_hooks), tuple(module._forward_hooks))


@attrs.frozen
class Change:
    """What a wrapper has changed of a module's call."""

    first: bool
    """A hook sees the input before those of earlier wrappers."""
    inputs: bool
    """A hook sees the input after them."""
    outputs: bool
    forward: bool

    @classmethod
    def between(cls, old: Call, new: Call) -> Change:
        """Return what ``new`` has besides ``old``."""
        start = next((at for at, key in enumerate(new.inputs) if key in old.inputs), len(new.inputs))
        return cls(
            first=start > 0,
            inputs=not {*new.inputs[start:]} <= {*old.inputs},
            outputs=not {*new.outputs} <= {*old.outputs},
            forward=new.forward != old.forward,
        )


class Splits:
    """Follows, from wrapper to wrapper, what each adds to which layer, and which layers it splits."""

    def __init__(self, parts: Parts, placements: Placements) -> None:
        self._before = dict(placements)
        self._taken = {name: "" for name, module, _ in layers(parts) if overridden_by(module)}
        """Layers whose forward was taken over, and by which wrapper; empty: by the model."""
        self._calls = calls(parts)
        self._changes: dict[tuple[str, str], Change] = {}
        """By layer and wrapper, of those that changed something."""

    def check(self, use: str, parts: Parts, placements: Placements) -> None:
        """Refuse what ``use``, which was just applied, splits unawares, or adds unawares to what is split.

        Raises:
            PluginError: its text names the parameter or layer, the wrappers, and what to do.
        """
        now = calls(parts)
        for key, (name, module, role) in zip(now, layers(parts), strict=True):
            old, new = self._calls.get(key, now[key]), now[key]
            change = Change.between(old, new)
            named = [(f"{name}.{k}", each) for k, each in module.named_parameters(recurse=False)]
            own = [n for n, parameter in named if n in self._before and not added_by(parameter)]
            if cut := {dim for n in own for dim in placements[n].sharded - self._before[n].sharded}:
                self._check_forward(use, name, min(cut))
            earlier = {dim for n in own for dim in blocks(self._before[n], role)}
            split = {dim for n in own for dim in blocks(placements[n], role)} - earlier
            for k, parameter in module.named_parameters():
                placed = placements[f"{name}.{k}"]
                if placed.name not in self._before:
                    check_addition(use, placed, parameter, role, change, earlier)
                elif known := self._changes.get((name, added_by(parameter))):
                    self._check_earlier(use, placed, parameter, role, known, split)
            if old != new:
                self._changes.setdefault((name, use), change)
        self._calls = now
        self._follow(use, parts, placements)

    def _check_forward(self, use: str, layer: str, dim: str) -> None:
        if by := self._taken.get(layer):
            raise PluginError(
                f"parallel '{use}' splits {layer} over {dim}, and '{by}' has taken over its forward, which "
                f"would compute with one rank's block of the weight: expected a module around it, or '{by}' "
                f"after '{use}', made for the blocks that placements record; if '{use}' gathers the weight "
                "before the forward, it splits it in `shard`"
            )

    def _check_earlier(
        self, use: str, placed: Placement, parameter: nn.Parameter, role: Role, known: Change, split: Set[str]
    ) -> None:
        """Check a parameter that another wrapper had added to a layer, whose call it had changed so.

        The whole input of a COLUMN is on every rank; its outputs are some of those of one process, and right
        if ``use`` has marked the gradient as partial. Outputs of other layers are partial themselves.
        """
        trained, whole = parameter.requires_grad, placed.same
        output = known.outputs or known.forward
        if output and role is not Role.COLUMN:
            whole = self._before[placed.name].same - placed.sharded
        elif not trained or not (output or (role is Role.ROW and (known.first or known.inputs))):
            return
        if parts := split & whole:
            by = added_by(parameter)
            partial = "its gradient on each rank would be partial"
            reason = partial if trained else "its hook would see partial outputs"
            raise PluginError(
                f"parallel '{use}' makes each rank along {min(parts)} compute a part of a {role.name}, to "
                f"which '{by}' has added {placed.name}, placed as whole: {reason}. List '{by}' after '{use}'"
            )

    def _follow(self, use: str, parts: Parts, placements: Placements) -> None:
        for part in parts:
            for name, parameter in part.named_parameters():
                if name not in self._before:
                    note_added(parameter, use)
        for name, module, _ in layers(parts):
            if overridden_by(module):
                self._taken.setdefault(name, use)
        self._before = dict(placements)


def check_addition(
    use: str, placed: Placement, parameter: nn.Parameter, role: Role, change: Change, split: Set[str]
) -> None:
    """Check what ``use`` added to a layer of which another wrapper makes ranks compute parts.

    A hook that comes first has the whole input of a COLUMN. Hooks of a ROW have this rank's features, those
    of its output the sum.
    """
    if role is Role.COLUMN:
        reads_part = change.inputs or change.outputs or change.forward
    else:
        inside = change.first or change.inputs or change.forward
        reads_part = role is Role.ROW and inside and not change.outputs
    if parameter.requires_grad and reads_part and (whole := split & placed.same):
        axis = "rows" if role is Role.COLUMN else "columns"
        raise PluginError(
            f"parallel '{use}' adds {placed.name}, placed as whole, to a {role.name} of which each rank "
            f"along {min(whole)} computes a part: its gradient on each rank is partial. Expected a placement "
            f"split as the weight's {axis}, or, if every rank has all of it, .sum_over('{min(whole)}')"
        )


def blocks(placed: Placement, role: Role) -> frozenset[str]:
    """Return over what a layer's parameter is split; of a COLUMN also where ranks use some of its outputs."""
    return placed.sharded | placed.summed if role is Role.COLUMN else placed.sharded


def layers(parts: Parts) -> Iterator[tuple[str, nn.Module, Role]]:
    """Yield the modules with a role of :data:`SPLIT`."""
    for part in parts:
        yield from ((name, module, tag.role) for name, module, tag in tagged(part) if tag.role in SPLIT)


def calls(parts: Parts) -> dict[tuple[int, str], Call]:
    """Return what runs in each of :func:`layers`, in their order; parts may have layers of one name."""
    return {
        (number, name): Call.of(module)
        for number, part in enumerate(parts)
        for name, module, _ in layers([part])
    }
