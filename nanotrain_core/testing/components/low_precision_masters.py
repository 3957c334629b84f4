"""``coarse``: a precision whose masters keep so few bits that the optimizer must carry the error.

Every case of the harness knows it: ``overrides={"precision": {"use": "coarse", "step": 0.1}}``.
"""

from __future__ import annotations

from typing import Any

import attrs

from nanotrain_core import hookimpl
from nanotrain_core.component import Component
from nanotrain_core.hookspecs import Register


@attrs.define(frozen=True, kw_only=True)
class CoarseConfig:
    """``[precision] use = "coarse"``."""

    step: float = 0.1
    """Weights are multiples of this. 0: masters are exact, but loaded and stored as others are."""


@hookimpl
def nanotrain_register_precision(register: Register) -> None:
    """Register ``coarse``."""
    register(
        Component(
            name="coarse",
            config=CoarseConfig,
            factory=f"{__name__}:build",
            summary="float64 weights that are multiples of a step, for tests",
        )
    )


def build(config: CoarseConfig) -> Any:
    """Return the precision."""
    from nanotrain_core.testing.components.low_precision_master_weights import Coarse

    return Coarse(config.step)
