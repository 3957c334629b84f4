"""Shards the experts of every layer over ranks, and sends tokens to them."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch
from torch import nn

from nanotrain_core.api import (
    Layout,
    NanotrainError,
    Role,
    divisors_near,
    join_with_or,
    override_forward,
    tagged,
)
from nanotrain_core.api.torch import Mesh, Parallel, Placement, Placements
from nanotrain_ep_deepseek import ExpertParallelConfig
from nanotrain_ep_deepseek.dispatch import Dispatcher


class ExpertParallel(Parallel):
    """The ``ep_deepseek`` component."""

    def __init__(self, config: ExpertParallelConfig) -> None:
        self.config = config

    def apply(self, part: nn.Module, placements: Placements, mesh: Mesh) -> nn.Module:
        """Shard every module of role EXPERTS over ep and etp. Along degrees of 1 nothing changes.

        Every rank of a pipeline stage must call such a module with its own tokens, or with none:
        data-parallel ranks do; a wrapper that splits the stage differently gives each rank its share.

        Raises:
            NanotrainError: the experts, or their width, do not divide by the degree.
        """
        if mesh.degree("ep", "etp") == 1:
            return part
        check_view(mesh.layout)
        for name, module, tag in list(tagged(part)):
            if tag.role is Role.EXPERTS:
                experts = split(name, module, tag.split, placements, mesh)
                override_forward(module, Dispatcher(experts, mesh))
        return part


def check_view(layout: Layout) -> None:
    """Reject a topology whose expert view cannot be expressed by placements of experts."""
    view = layout.views.get("expert")
    missing = {"edp", "ep", "etp"} - set(view.dims if view else ())
    if missing:
        raise NanotrainError(
            f"ep_deepseek: the topology's view 'expert' has no {', '.join(sorted(missing))}: expected the "
            'dimensions edp, ep and etp, as those of [topology] use = "grid"'
        )


def split(name: str, module: nn.Module, widths: Mapping[str, int], placements: Placements, mesh: Mesh) -> int:
    """Leave this rank its block of ``module``'s parameters and buffers; return its number of experts.

    Args:
        name: of the module in its part.
        module: stacked experts, on ``meta``.
        widths: the tag's ``split``: for each parameter the axis of an expert's width.
        placements: updated.
        mesh: of this rank.
    """
    parameters = dict(module.named_parameters())
    experts = len(next(iter(parameters.values())))
    for key, old in (*parameters.items(), *module.named_buffers()):
        full = f"{name}.{key}" if name else key
        placement = expert_placement(placements[full], mesh)
        length = len(old) if old.dim() else "missing"
        if length != experts:
            raise NanotrainError(
                f"ep_deepseek: axis 0 of {full} is {length}, but of another parameter of {name} it "
                f"is {experts}: expected the number of experts in all of them"
            )
        placement = split_axis(placement, 0, "experts", "ep", mesh)
        if mesh.size("etp") > 1 and (key in parameters or key in widths):  # a buffer may have no width
            placement = split_axis(placement, width_axis(full, key, widths), "columns", "etp", mesh)
        placements[full] = placement
        parent, _, last = key.rpartition(".")
        block = torch.empty(placement.shape, dtype=old.dtype, device="meta")
        new = nn.Parameter(block, old.requires_grad) if key in parameters else block
        setattr(module.get_submodule(parent), last, new)
    return experts


def expert_placement(dense: Placement, mesh: Mesh) -> Placement:
    """Place a whole tensor in the expert view, whatever view it was placed in before."""
    if dense.sharded:
        raise NanotrainError(
            f"ep_deepseek: {dense.name} is already split along {', '.join(sorted(dense.sharded))} by a "
            "wrapper before: expected experts that are whole; etp cuts them along their width"
        )
    placed = Placement.whole(dense.name, dense.global_shape, mesh.layout, view="expert")
    return attrs.evolve(placed, stages=dense.stages)


def width_axis(full: str, key: str, widths: Mapping[str, int]) -> int:
    """Return the axis of an expert's width; without it, every rank would add the parameter again."""
    if key not in widths:
        known = ", ".join(sorted(widths)) or "none"
        raise NanotrainError(
            f"ep_deepseek: {full} cannot be split along etp: its model's tag(..., split={{...}}) names no "
            f"axis of it, only of {known}; expected topology.etp = 1"
        )
    return widths[key]


def split_axis(placement: Placement, axis: int, what: str, dim: str, mesh: Mesh) -> Placement:
    """Return this rank's block along ``axis``, or refuse a degree that does not divide it."""
    length, degree = placement.global_shape[axis], mesh.size(dim)
    if length % degree:
        raise NanotrainError(
            f"ep_deepseek: {placement.name} has {length} {what}, which do not divide by {dim} = {degree}; "
            f"topology.{dim} could be {join_with_or(divisors_near(length, degree))}"
        )
    return placement.split(axis, dim, mesh.coordinate(dim), degree)
