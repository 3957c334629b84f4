"""``sliced``: minimal tensor parallelism, which relies on every role that a model declares.

The harness puts it around a model under test. It splits no embedding, head or expert.
"""

from __future__ import annotations

from typing import Any

import attrs

from nanotrain_core import hookimpl
from nanotrain_core.component import Component
from nanotrain_core.hookspecs import Register


@attrs.define(frozen=True, kw_only=True)
class SlicedConfig:
    """How layers are split."""

    sequence_parallel: bool = False
    """Whether ranks also split the tokens between the layers that they split, so that the gradients of norms,
    biases, embedding and head are partial."""


@hookimpl
def nanotrain_register_parallel(register: Register) -> None:
    """Register ``sliced``."""
    register(
        Component(
            name="sliced",
            config=SlicedConfig,
            factory=f"{__name__}:build",
            summary="slices of linear layers, as their roles say, for tests",
            mesh_dims={"tp"},
        )
    )


def build(config: SlicedConfig) -> Any:
    """Return the wrapper."""
    from nanotrain_core.testing.components.tensor_parallel_layers import Sliced

    return Sliced(config.sequence_parallel)
