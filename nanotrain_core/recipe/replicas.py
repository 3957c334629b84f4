"""The dimensions along which the core sums gradients without a component's help. Torch-free."""

from __future__ import annotations

import attrs

from nanotrain_core.layout.layout import Layout
from nanotrain_core.recipe.tree import Recipe


def replica_dims(recipe: Recipe, layout: Layout) -> tuple[str, ...]:
    """Return the data dimensions along which ranks hold the same parameters unless a component shards them.

    In the dense view these are the dimensions that divide the batch's rows. In other views they are those
    without a degree in the recipe, which take the ranks that the others leave, such as ``edp`` of ``grid``.
    Along a configured one, such as ``ep``, ranks differ in what they hold, which takes a component.
    """
    dense, configured = layout.views["dense"].dims, attrs.fields_dict(type(recipe.topology.config))
    left = (dim for dim in layout.data_dims if dim in layout.dims and dim not in (*dense, *configured))
    return (*layout.row_dims, *left)
