"""What plugins may still use and should not: each use warns, later fails, and at last is gone.

The policy is in docs/compatibility.md: what goes away warns for at least one minor version, and is an error,
which says what to use, for one more.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import attrs
from packaging.version import Version

from nanotrain_core import __version__
from nanotrain_core.errors import PluginError

#: What becomes of a use: in this order, from version to version.
Stage = Literal["fine", "warns", "fails", "gone"]


class NanotrainDeprecationWarning(DeprecationWarning):
    """A plugin uses what will be gone. pytest shows it, and so does ``python -W default``."""


@attrs.define(frozen=True, kw_only=True)
class Deprecation:
    """One thing that goes away."""

    instead: str
    """What to use, as half a sentence: ``use nanotrain_core.api.read_sequences``."""
    warns: str
    """The version of the core from which its use warns."""
    fails: str
    """The version from which its use is an error, a minor one later at least."""
    gone: str
    """The version that knows nothing of it any more: its entry must be gone, too."""

    def __attrs_post_init__(self) -> None:
        """Refuse what skips a stage.

        Raises:
            ValueError: two of the versions are of one minor version, or out of order.
        """
        minors = [Version(text).release[:2] for text in (self.warns, self.fails, self.gone)]
        if not minors[0] < minors[1] < minors[2]:
            raise ValueError(
                f"expected a minor version for each stage, got {self.warns}, {self.fails}, {self.gone}"
            )

    def stage(self, version: str) -> Stage:
        """Return what becomes of a use in a version of the core."""
        now = Version(version)
        if now >= Version(self.gone):
            return "gone"
        if now >= Version(self.fails):
            return "fails"
        return "warns" if now >= Version(self.warns) else "fine"

    def used(self, what: str, version: str, *, stacklevel: int = 2) -> None:
        """Tell of a use of ``what``, or refuse it.

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


#: Names of ``nanotrain_core.api`` and its neighbours that go away: door -> name -> (deprecation, its value).
NAMES: Mapping[str, Mapping[str, tuple[Deprecation, Callable[[], Any]]]] = {}


def attribute_of(door: str, version: str = __version__) -> Callable[[str], Any]:
    """Return ``__getattr__`` of a door: it finds the names of :data:`NAMES`, and tells of their use."""

    def find(name: str) -> Any:
        known = NAMES.get(door, {}).get(name)
        if known is None or known[0].stage(version) == "gone":
            raise AttributeError(f"module {door!r} has no attribute {name!r}")
        deprecation, value = known
        deprecation.used(f"{door}.{name}", version)
        return value()

    return find
