"""Maps source files to the component of a recipe that they belong to, for any plugin."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs

from nanotrain_core.api import Component, Layout, Recipe, Registry, Selection
from nanotrain_core.api.torch import Parallel
from nanotrain_plan.dry.origin import Origin, place_of

#: What the core's own files are told as.
CORE = "the core"


@attrs.define(frozen=True)
class Owners:
    """The components that a recipe selects."""

    recipe: Recipe
    registry: Registry

    @cached_property
    def selections(self) -> Mapping[str, Selection]:
        """Selections by what they are told as: ``parallel 'tp'``."""
        found = {}
        for field in attrs.fields(type(self.recipe)):
            value = getattr(self.recipe, field.name)
            for each in value if isinstance(value, tuple) else (value,):
                if isinstance(each, Selection) and each.kind not in ("monitor", "data", "kernels"):
                    found[f"{each.kind} '{each.use}'"] = each
        return found

    @cached_property
    def _packages(self) -> Mapping[str, str]:
        """Folder of a package (or a file, of a plugin that is one) -> component."""
        found: dict[str, str] = {}
        for label in self.selections:
            origin = self.place(label)
            if origin is not None and not self._is_core(label):
                path = Path(origin.file)
                package = (path.parent / "__init__.py").exists()
                found.setdefault(str(path.parent) if package else str(path), label)
        return found

    def _is_core(self, label: str) -> bool:
        return self.component(label).factory.startswith("nanotrain_core.")

    def component(self, label: str) -> Component:
        """Return the description that a plugin registered."""
        selection = self.selections[label]
        return self.registry.get(selection.kind, selection.use)

    def place(self, label: str, method: str = "") -> Origin | None:
        """Return where the object behind a component is written, or that method of it."""
        if not method:
            factory: Any = self.component(label).load()
            return place_of(factory)
        return place_of(getattr(type(self.registry.build(self.selections[label])), method))

    def applied(self, label: str) -> Origin | None:
        """Return where a wrapper is applied to a part of the model; None if it leaves parts unchanged."""
        wrapper = type(self.registry.build(self.selections[label]))
        return None if wrapper.apply is Parallel.apply else place_of(wrapper.apply)

    def of_kind(self, kind: str) -> list[str]:
        """Return what components of a kind are told as, in the recipe's order."""
        return [label for label, each in self.selections.items() if each.kind == kind]

    def of(self, origin: Origin | None) -> str:
        """Return who a place in the code belongs to."""
        if origin is None:
            return CORE
        return next((who for where, who in self._packages.items() if origin.file.startswith(where)), CORE)

    def axis(self, axis: str, ranks: tuple[int, ...], origin: Origin | None, layout: Layout) -> str:
        """Return the mesh dimension that is meant if the same ranks differ along dimensions of both views.

        That is the one handled by the component which calls the collective: for an all-to-all of experts,
        ``ep`` and not ``tp``. Otherwise ``axis``.
        """
        who = self.of(origin)
        for dim in self.component(who).mesh_dims if who != CORE else ():
            if layout.degree(dim) > 1 and layout.ranks(ranks[0], dim) == ranks:
                return dim
        return axis
