"""Activation offload: what a layer saves for its backward pass waits in pinned host memory.

The plugin's entry module: every ``nanotrain`` command imports it, so it never imports torch.
"""

import attrs

from nanotrain_core.api import Component, Range, Register, hookimpl

__version__ = "0.1.0"


@attrs.define(frozen=True, kw_only=True)
class OffloadConfig:
    """``[[parallel]] use = "activation_offload"``."""

    min_mb: float = attrs.field(default=1.0, validator=Range(0.0, 1e6))
    """Smaller tensors stay on the device: a copy of few bytes costs more than it frees."""
    keep: int = attrs.field(default=1, validator=Range(0))
    """Number of layers at the end of a stage that are not offloaded: backward needs them first."""


@hookimpl
def nanotrain_register_parallel(register: Register) -> None:
    """Register ``activation_offload``."""
    register(
        Component(
            name="activation_offload",
            config=OffloadConfig,
            factory="nanotrain_activation_offload.offload:ActivationOffload",
            summary="activation offload to pinned host memory between forward and backward",
        )
    )
