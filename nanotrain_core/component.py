"""A component: the description by which a plugin announces one thing a recipe can ``use``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from importlib import import_module
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from nanotrain_core.errors import Problem
    from nanotrain_core.layout import Layout
    from nanotrain_core.recipe.tree import Recipe

#: The kinds of components, in the order a run builds them.
KINDS = (
    "topology",
    "model",
    "parallel",
    "precision",
    "optimizer",
    "schedule",
    "checkpoint",
    "data",
    "monitor",
)

#: Kinds of which a recipe lists any number, in an order that matters.
LISTED_KINDS = frozenset({"parallel", "monitor"})

#: Capabilities that exactly one component of a run may provide: word -> what it means.
EXCLUSIVE_CAPABILITIES = {
    "gradient_sync": "sums each gradient over the ranks that hold a part of it",
}


class Support(Enum):
    """How a component stands to an optional ability that the conformance harness can test."""

    FULL = "full"
    PARTIAL = "partial"
    UNSUPPORTED = "unsupported"
    NOT_IMPLEMENTED = "not implemented"


#: A component's check of the whole recipe: yields one Problem per thing that cannot work.
CrossCheck = Callable[["Recipe", Any, "Layout"], Iterable["Problem"]]


def _words(value: Iterable[str]) -> frozenset[str]:
    if isinstance(value, str):
        raise TypeError(f"expected a set of words, got the string {value!r}")
    return frozenset(value)


@attrs.define(frozen=True, kw_only=True, eq=False)
class Component:
    """What a plugin tells the registry about one component. Nothing here imports torch."""

    name: str
    """The word a recipe writes after ``use =``."""
    config: type
    """A frozen attrs class: the keys of this component's table in a recipe, typed, with defaults."""
    factory: str
    """``"module:attribute"`` of a callable that takes the config and returns the component's object."""
    summary: str = ""
    """One line for ``nanotrain plugins``."""
    provides: frozenset[str] = attrs.field(default=frozenset(), converter=_words)
    """Capabilities this component brings to a run, for example ``"gradient_sync"``."""
    requires: frozenset[str] = attrs.field(default=frozenset(), converter=_words)
    """Capabilities that some other component of the run must provide."""
    conflicts: frozenset[str] = attrs.field(default=frozenset(), converter=_words)
    """Capabilities or component names (``"kind:name"``) it cannot share a run with."""
    mesh_dims: frozenset[str] = attrs.field(default=frozenset(), converter=_words)
    """Mesh dimensions this component knows how to use. A recipe whose topology gives a dimension
    a degree above 1 that no component of the run handles is refused."""
    supports: dict[str, Support] = attrs.field(factory=dict)
    """Optional abilities, for the harness and ``nanotrain plugins``."""
    check: CrossCheck | None = None
    """A cross-check of the whole recipe, run before any process starts. Must not import torch."""

    def build(self, config: Any) -> Any:
        """Import the factory and call it with ``config``: the only place a component's code loads."""
        module, _, attribute = self.factory.partition(":")
        factory: Any = import_module(module)
        for part in attribute.split("."):
            factory = getattr(factory, part)
        return factory(config)
