"""Matrices of which ranks would cut blocks: how wrappers split them, as roles define it."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
from torch import nn

from nanotrain_core.api import Layout, Role, Tag, tagged
from nanotrain_core.api.torch import Piece, Placement
from nanotrain_fp4_master import FP4MasterConfig
from nanotrain_fp4_master.precision import FP4Master, cut, replaced, straddling


def cut_in(model: nn.Module, config: FP4MasterConfig, layout: Layout) -> Iterator[str]:
    """Yield an error text for each low-bit matrix whose blocks ranks along tp, ep or etp would cut."""
    precision = FP4Master(config)
    for prefix, module, found in tagged(precision.convert(model)):
        for key, weight in module.named_parameters(recurse=False):
            name = f"{prefix}.{key}" if prefix else key
            trained = weight.requires_grad and weight.dtype == precision.parameter_dtype
            if trained and precision.is_low(name, weight.dim()):
                placement = of_first_rank(Placement.whole(name, weight.shape, layout), key, found, layout)
                if cut(placement, config.block):
                    yield straddling(Piece(weight, placement), config)


def of_first_rank(whole: Placement, key: str, found: Tag, layout: Layout) -> Placement:
    """Return the first rank's part of a weight: with it no other's is cut, as all have the same size.

    Whole along what does not divide: several ranks use copies then, or it is refused elsewhere.
    """
    axes = {Role.COLUMN: {0: "tp"}, Role.ROW: {1: "tp"}, Role.EXPERTS: {0: "ep"}}.get(found.role, {})
    if key in found.split:
        axes |= {found.split[key]: "etp"}
    for axis, dim in axes.items():
        units, degree = whole.shape[axis], layout.degree(dim)
        if (units // found.unit if found.role is not Role.EXPERTS else units) % degree == 0:
            whole = attrs.evolve(whole, shape=replaced(whole.shape, axis, units // degree))
    return whole
