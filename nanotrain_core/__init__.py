"""nanotrain: compose language-model training from plugins.

Importing this package is cheap and never imports torch, so that commands that only read
recipes respond immediately. ``RuntimeEngine`` is loaded on first use.
"""

from typing import TYPE_CHECKING, Any

import pluggy

#: The core's version, on which plugins declare a version range.
__version__ = "0.1.0"

#: Marks a function of a plugin as an implementation of a hook of :mod:`nanotrain_core.hookspecs`.
hookimpl = pluggy.HookimplMarker("nanotrain")

if TYPE_CHECKING:
    from nanotrain_core.engine import RuntimeEngine as RuntimeEngine


def __getattr__(name: str) -> Any:
    if name == "RuntimeEngine":
        from nanotrain_core.engine import RuntimeEngine

        return RuntimeEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
