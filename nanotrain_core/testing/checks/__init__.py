"""The checks: a flat list of named invariants. One module per kind, and ``every`` for all kinds.

A check takes a :class:`~nanotrain_core.testing.case.Case` and returns nothing, or raises
AssertionError with the numbers. Its docstring states the invariant.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import TypeVar

import attrs

from nanotrain_core.component import Support
from nanotrain_core.testing.case import Case

Function = Callable[..., None]
F = TypeVar("F", bound=Function)
Applies = Callable[[Case], bool]
Limit = Callable[[Case], str | None]


@attrs.define(frozen=True)
class Check:
    """One invariant that every component of a kind keeps."""

    kind: str
    """A kind of component, or ``every``."""
    name: str
    since: str
    """Version of the core that brought it. New checks come only in minor versions."""
    variants: tuple[str, ...]
    applies: Applies
    function: Function
    of_component: bool = False
    """Whether it looks at the component alone: of several cases of one, the first will do."""
    promise: str = ""
    """A word of ``Component.supports`` or ``supports_for``: a component that declares it partial or
    unsupported is not held to it."""
    limit: Limit | None = None
    """Returns why the harness cannot check a case; None if it can."""

    def declined(self, case: Case) -> str | None:
        """Return why the component is not held to this, as declared or for a limit of ours; None if it is."""
        limit = self.limit(case) if self.limit is not None else None
        if limit is not None:
            return limit
        support = case.supported(self.promise) if self.promise else Support.FULL
        return None if support is Support.FULL else f"it declares {self.promise}: {support.value}"

    @property
    def invariant(self) -> str:
        """The invariant in words."""
        return " ".join((self.function.__doc__ or "").split())


_CHECKS: list[Check] = []


def check(
    kind: str,
    *,
    since: str,
    variants: tuple[str, ...] = (),
    applies: Applies = lambda case: True,
    of_component: bool = False,
    promise: str = "",
    limit: Limit | None = None,
) -> Callable[[F], F]:
    """Add a function to the checks of ``kind``, under the function's name."""

    def add(function: F) -> F:
        name = function.__name__
        _CHECKS.append(Check(kind, name, since, variants, applies, function, of_component, promise, limit))
        return function

    return add


def distributed(case: Case) -> bool:
    """For checks that need more than one rank."""
    return case.world_size > 1


def syncs(case: Case) -> bool:
    """For checks of an optimizer that sums gradients itself: it is held to what wrappers that do are."""
    return "gradient_sync" in case.component().provides


def syncs_distributed(case: Case) -> bool:
    """Likewise, where there is more than one rank."""
    return distributed(case) and syncs(case)


def trains_the_model(case: Case) -> bool:
    """For checks with one more parameter of the model: a wrapper with parameters of its own may freeze it."""
    return case.component().added is None


def every_check() -> list[Check]:
    """Return all checks of all kinds, those of every kind first."""
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
    return sorted(_CHECKS, key=lambda each: each.kind != "every")


def checks_of(case: Case) -> list[Check]:
    """Return the checks that apply to a case and that its component does not decline, those of every kind
    first.
    """
    mine = (each for each in every_check() if each.kind in ("every", case.kind) and each.applies(case))
    return [each for each in mine if each.declined(case) is None]
