"""``ranged``: minimal optimizer-state sharding, for optimizers tested without other plugins.

Every case of the harness knows it: ``overrides={"parallel": [{"use": "ranged"}]}``.
"""

from __future__ import annotations

from typing import Any

import attrs

from nanotrain_core import hookimpl
from nanotrain_core.component import Component
from nanotrain_core.hookspecs import Register


@attrs.define(frozen=True, kw_only=True)
class RangedConfig:
    """It has no keys."""


@hookimpl
def nanotrain_register_parallel(register: Register) -> None:
    """Register ``ranged``."""
    register(
        Component(
            name="ranged",
            config=RangedConfig,
            factory=f"{__name__}:build",
            summary="an all-reduce per parameter, of which each rank updates a range, for tests",
            provides={"gradient_sync"},
            mesh_dims={"dp"},
        )
    )


def build(config: RangedConfig) -> Any:
    """Return the gradient sync."""
    from nanotrain_core.testing.components.zero1_gradients import RangedGradients

    return RangedGradients()
