"""``wide_norms``: a precision with two dtypes, float32 for matrices and float64 for vectors.

Norms in a wider dtype than matrices are usual; who keeps all gradients in one buffer must still be right.
Every case of the harness knows it: ``overrides={"precision": {"use": "wide_norms"}}``.
"""

from __future__ import annotations

from typing import Any

import attrs

from nanotrain_core import hookimpl
from nanotrain_core.component import Component
from nanotrain_core.hookspecs import Register


@attrs.define(frozen=True, kw_only=True)
class WideNormsConfig:
    """It has no keys."""


@hookimpl
def nanotrain_register_precision(register: Register) -> None:
    """Register ``wide_norms``."""
    register(
        Component(
            name="wide_norms",
            config=WideNormsConfig,
            factory=f"{__name__}:build",
            summary="float32 matrices and float64 vectors, for tests",
        )
    )


def build(config: WideNormsConfig) -> Any:
    """Return the precision."""
    from nanotrain_core.testing.components.float64_norms_precision import WideNorms

    return WideNorms()
