"""``summed``: a minimal gradient sync, for plugins tested without other plugins.

Every case of the harness knows it: ``overrides={"parallel": [{"use": "summed"}]}``.
"""

from __future__ import annotations

from typing import Any

import attrs

from nanotrain_core import hookimpl
from nanotrain_core.component import Component
from nanotrain_core.hookspecs import Register


@attrs.define(frozen=True, kw_only=True)
class SummedConfig:
    """It has no keys."""


@hookimpl
def nanotrain_register_parallel(register: Register) -> None:
    """Register ``summed``."""
    register(
        Component(
            name="summed",
            config=SummedConfig,
            factory=f"{__name__}:build",
            summary="one all-reduce per parameter after backward, for tests",
            provides={"gradient_sync"},
            mesh_dims={"dp"},
        )
    )


def build(config: SummedConfig) -> Any:
    """Return the gradient sync."""
    from nanotrain_core.testing.components.all_reduce_gradients import SummedGradients

    return SummedGradients()
