"""Faster training on CPUs: kernels, and communication of ranks on one host through shared memory.

The plugin's entry module: every ``nanotrain`` command imports it, so it never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs

from nanotrain_core.api import Component, Register, Role, StaysEager, hookimpl

if TYPE_CHECKING:
    from nanotrain_core.api import Layout, Recipe

__version__ = "0.1.0"


@attrs.define(frozen=True, kw_only=True)
class CPUKernelsConfig:
    """``[kernels] use = "cpu"``."""

    shared_memory: bool = True
    """Let ranks of one host exchange through memory that they share, in place of gloo's sockets."""


def stays_eager(recipe: Recipe, config: CPUKernelsConfig, layout: Layout) -> Iterator[StaysEager]:
    """Yield that layers are not compiled: these functions read memory layouts and row counts as they run."""
    yield StaysEager(Role.BLOCK, "its functions choose by sizes and memory as they run, which no graph holds")


@hookimpl
def nanotrain_register_kernels(register: Register) -> None:
    """Register ``cpu``."""
    register(
        Component(
            name="cpu",
            config=CPUKernelsConfig,
            factory="nanotrain_cpu.kernels:CPUKernels",
            summary="faster attention, norms, experts and communication on a CPU",
            provides={"kernels:cpu"},
            stays_eager=stays_eager,
        )
    )
