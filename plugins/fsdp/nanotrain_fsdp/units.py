"""Which modules of a part gather their parameters together: layers, and what differs in dtype or in ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs
import torch
from torch import nn

from nanotrain_core.api import Layout, Role, tagged
from nanotrain_core.api.torch import PackedWeight, Placement, Placements
from nanotrain_fsdp.packed import cut_in_rows


@attrs.define(frozen=True)
class Axes:
    """The dimensions of the mesh that one of data-parallel ranks is made of."""

    whole: str
    """``dp`` or ``edp``."""
    shard: str
    """Along which rows differ: ``dp_shard``; without hybrid sharding ``dp`` itself."""
    replicate: str | None
    """Along which they are the same, ``dp_replicate``, if there are several ranks."""

    @property
    def dims(self) -> tuple[str, ...]:
        """The dimensions of several ranks, the slowest first."""
        return (self.shard,) if self.replicate is None else (self.replicate, self.shard)

    def place(self, placement: Placement, layout: Layout) -> Placement:
        """Return the placement along these dimensions; replicas sum gradients in backward."""
        if self.shard == self.whole:
            return placement
        into = f"{self.whole}_replicate", self.shard
        return placement.divide(self.whole, into, layout).complete_over(into[0])


def axes_of(layout: Layout) -> dict[str, Axes]:
    """Return how dp, and edp of experts, are divided, if shards are on several ranks."""
    found = {}
    for dim in ("dp", "edp"):
        hybrid = f"{dim}_shard" in layout.dims
        shard, replicate = (f"{dim}_shard", f"{dim}_replicate") if hybrid else (dim, None)
        if layout.degree(shard) > 1:
            found[dim] = Axes(dim, shard, replicate if replicate and layout.size(replicate) > 1 else None)
    return found


@attrs.define(frozen=True, eq=False)
class Unit:
    """A module whose parameters are gathered before it runs, together."""

    module: nn.Module
    dim: str
    """The dimension of the mesh along which they are sharded."""
    parameters: tuple[nn.Parameter, ...]
    """Those of the module that no unit within it has."""
    reduce_dtype: torch.dtype | None
    """Of gradients when they are summed; None: their own."""
    inner: bool = False
    """Whether it lies within a layer, whose other parameters are of another dtype or dimension."""


def units(part: nn.Module, placements: Placements, ranks: Mapping[str, int]) -> Iterator[Unit]:
    """Yield the units of ``part``, inner ones first and the part itself last.

    Frozen ones are gathered, too, but without gradients. In no unit are parameters whose gradients are
    partial along none of the dimensions of ``ranks``, or would be; what routers keep and do not train, which
    each rank updates itself; and packed ones of which ranks would get parts of stored rows.

    Args:
        part: of the model.
        placements: of its parameters.
        ranks: along each dimension, of how many the shards are.
    """
    along = {
        parameter: next((dim for dim in ranks if dim in placements[name].summed), None)
        for name, parameter in part.named_parameters()
    }
    kept = {
        each
        for _, module, tag in tagged(part)
        if tag.role is Role.ROUTER
        for each in module.parameters()
        if not each.requires_grad
    }
    kept |= {
        each
        for each, dim in along.items()
        if dim is not None and isinstance(each, PackedWeight) and not cut_in_rows(each, ranks[dim])
    }
    sharded = {each for each, dim in along.items() if dim is not None} - kept
    taken: set[nn.Parameter] = set()

    def unit(module: nn.Module, dim: str = "dp", *, inner: bool = False) -> Unit:
        own = tuple(each for each in module.parameters() if each in sharded - taken)
        taken.update(own)
        narrow = any(each.dtype.itemsize < 4 for each in module.parameters())
        return Unit(module, dim, own, torch.float32 if narrow else None, inner)

    usual = next((each.dtype for each in part.parameters()), None)
    for module in part.modules():  # experts, and norms wider than matrices
        forms = {
            (each.dtype, str(along[each])) for each in module.parameters(recurse=False) if each in sharded
        }
        if forms - {(usual, "dp")}:
            yield unit(module, min(dim for _, dim in forms), inner=True)
    for _, module, tag in tagged(part):
        if tag.role is Role.BLOCK:
            yield unit(module)
    yield unit(part)
