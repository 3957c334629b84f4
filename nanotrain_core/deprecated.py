"""Deprecated names for plugins: each use first warns, later fails, and finally the name is removed.

The policy is in docs/compatibility.md: a deprecated name warns for at least one minor version, and raises an
error, which names the replacement, for one more.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import attrs
from packaging.version import Version

from nanotrain_core import __version__
from nanotrain_core.errors import PluginError

#: The stages of a deprecation, in this order, from version to version.
Stage = Literal["fine", "warns", "fails", "gone"]


class NanotrainDeprecationWarning(DeprecationWarning):
    """A plugin uses a name that will be removed. Shown by pytest and by ``python -W default``."""


@attrs.define(frozen=True, kw_only=True)
class Deprecation:
    """One deprecated name."""

    instead: str
    """The replacement, as a clause: ``use nanotrain_core.api.read_sequences``."""
    warns: str
    """The version of the core from which its use warns."""
    fails: str
    """The version from which its use is an error, at least one minor version later."""
    gone: str
    """The version that removes it: its entry must be removed, too."""

    def __attrs_post_init__(self) -> None:
        """Reject versions that skip a stage.

        Raises:
            ValueError: two of the versions have the same minor version, or they are out of order.
        """
        minors = [Version(text).release[:2] for text in (self.warns, self.fails, self.gone)]
        if not minors[0] < minors[1] < minors[2]:
            raise ValueError(
                f"expected a minor version for each stage, got {self.warns}, {self.fails}, {self.gone}"
            )

    def stage(self, version: str) -> Stage:
        """Return the stage of the deprecation in a version of the core."""
        now = Version(version)
        if now >= Version(self.gone):
            return "gone"
        if now >= Version(self.fails):
            return "fails"
        return "warns" if now >= Version(self.warns) else "fine"

    def used(self, what: str, version: str, *, stacklevel: int = 2) -> None:
        """Warn of a use of ``what``, or reject it.

        Raises:
            PluginError: from the version :attr:`fails` on.
        """
        stage = self.stage(version)
        text = f"{what} is deprecated since nanotrain-core {self.warns}"
        if stage == "warns":
            later = f"{text}, an error from {self.fails} on: {self.instead}"
            warnings.warn(later, NanotrainDeprecationWarning, stacklevel=stacklevel + 1)
        elif stage in ("fails", "gone"):
            raise PluginError(f"{text}, and an error now: {self.instead}")


#: Deprecated names of ``nanotrain_core.api`` and its neighbors: module -> name -> (deprecation, its value).
NAMES: Mapping[str, Mapping[str, tuple[Deprecation, Callable[[], Any]]]] = {}


def attribute_of(api: str, version: str = __version__) -> Callable[[str], Any]:
    """Return ``__getattr__`` of a public module: it finds the names of :data:`NAMES` and reports their
    use."""

    def find(name: str) -> Any:
        known = NAMES.get(api, {}).get(name)
        if known is None or known[0].stage(version) == "gone":
            raise AttributeError(f"module {api!r} has no attribute {name!r}")
        deprecation, value = known
        deprecation.used(f"{api}.{name}", version)
        return value()

    return find
