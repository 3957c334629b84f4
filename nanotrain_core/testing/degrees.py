"""The degrees of a case for any topology: keys of that topology, or dimensions of its layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import attrs

from nanotrain_core.component import Component
from nanotrain_core.errors import NanotrainError, RecipeError, did_you_mean
from nanotrain_core.layout.layout import Layout
from nanotrain_core.recipe.structure import structure
from nanotrain_core.recipe.tree import Selection
from nanotrain_core.registry.registry import Registry

if TYPE_CHECKING:  # contracts import torch
    from nanotrain_core.contracts.topology import Topology

#: World sizes to try beyond the product of the degrees: a topology may have more dimensions than were named.
MOST = 64


@attrs.define(frozen=True)
class Degrees:
    """The layout properties that a case requires, and the table of the topology that provides them."""

    wanted: Mapping[str, int]
    table: Any
    """``[topology]`` without the degrees: ``use``, and keys that others have set."""
    registry: Registry

    @property
    def keys(self) -> dict[str, int]:
        """The degrees to write into the table: its keys, and all if the topology is unknown."""
        component = self._component()
        if component is None:
            return dict(self.wanted)
        known = attrs.fields_dict(component.config)
        return {dim: degree for dim, degree in self.wanted.items() if dim in known}

    def fewest_ranks(self) -> int | None:
        """Return the smallest world size with every degree, None if there is none."""
        topology = self._topology()
        if topology is not None:
            for ranks in range(1, max(prod(self.wanted.values()), MOST) + 1):
                layout = _layout(topology, ranks)
                if layout is not None and not any(self._misfits(layout)):
                    return ranks
        return None

    def check(self, ranks: int) -> None:
        """Check the degrees against the layout of this many ranks.

        Raises:
            RecipeError: they do not fit, or one is neither a key of the topology nor a dimension that
                comes out as large.
        """
        topology = self._topology()
        if topology is None:
            return
        try:
            layout = topology.layout(ranks)
        except ValueError as error:
            raise RecipeError([f"topology '{self.table['use']}', number of ranks {ranks}: {error}"]) from None
        problems = list(self._misfits(layout))
        if problems:
            fewest = self.fewest_ranks()
            if {*layout.dims, *self.keys} >= set(self.wanted):
                problems.append(f"{fewest or 'no number of'} ranks would have all of these degrees")
            raise RecipeError(problems)

    def _component(self) -> Component | None:
        use = self.table.get("use") if isinstance(self.table, Mapping) else None
        offers = self.registry.offers("topology", use) if isinstance(use, str) else ()
        return offers[0][1] if len(offers) == 1 else None

    def _topology(self) -> Topology | None:
        """Build the topology, None if its table is invalid: loading the recipe reports why."""
        component = self._component()
        if component is None:
            return None
        rest = {key: value for key, value in self.table.items() if key != "use"} | self.keys
        config, problems = structure(rest, component.config, "topology")
        if problems:
            return None
        try:
            topology: Topology = self.registry.build(Selection("topology", component.name, config))
        except NanotrainError:
            return None
        return topology

    def _misfits(self, layout: Layout) -> Iterator[str]:
        """Yield why a layout does not have the degrees."""
        label = f"topology '{self.table['use']}'"
        for dim, degree in self.wanted.items():
            if dim in layout.dims:
                if layout.size(dim) != degree:
                    size = f"{dim} = {layout.size(dim)}"
                    yield f"degree {dim} = {degree}: {label} lays {layout.world_size} ranks out with {size}"
            elif dim not in self.keys:
                near = did_you_mean(dim, layout.dims)
                yield f"degree {dim} = {degree}: {label} has no {dim}{near}; it has {', '.join(layout.dims)}"


def _layout(topology: Topology, ranks: int) -> Layout | None:
    """Return the layout, None if there is none: running the recipe reports why."""
    try:
        return topology.layout(ranks)
    except Exception:
        return None
