"""``spread``: minimal expert parallelism, for components tested without other plugins.

Every case of the harness knows it, as ``summed``. It wants a model with experts, such as ``routed``.
"""

from __future__ import annotations

from typing import Any

import attrs

from nanotrain_core import hookimpl
from nanotrain_core.component import Component
from nanotrain_core.hookspecs import Register


@attrs.define(frozen=True, kw_only=True)
class SpreadConfig:
    """It has no keys."""


@hookimpl
def nanotrain_register_parallel(register: Register) -> None:
    """Register ``spread``."""
    register(
        Component(
            name="spread",
            config=SpreadConfig,
            factory=f"{__name__}:build",
            summary="experts on several ranks, each of which computes with the tokens of all, for tests",
            mesh_dims={"ep"},
        )
    )


def build(config: SpreadConfig) -> Any:
    """Return the wrapper."""
    from nanotrain_core.testing.components.expert_parallel_layers import Spread

    return Spread()
