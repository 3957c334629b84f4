"""Fully sharded data parallelism (ZeRO-3): weights, gradients and optimizer state in shards of rows.

The plugin's entry module: every ``nanotrain`` command imports it, so it never imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import attrs

from nanotrain_core.api import Component, Problem, Register, Support, hookimpl

if TYPE_CHECKING:
    from nanotrain_core.api import Layout, Recipe

__version__ = "0.1.0"


@attrs.define(frozen=True, kw_only=True)
class FSDP2Config:
    """``[[parallel]] use = "fsdp2"``, in place of ``ddp`` and ``zero12``."""

    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward pass, and gather them again for its backward pass
    (ZeRO-3). False keeps them until then: one collective less per layer, for the memory of all weights."""


def check(recipe: Recipe, config: FSDP2Config, layout: Layout) -> Iterator[Problem]:
    """Check who shares weights, and torch: others lack ``FSDPModule.set_reduce_scatter_unused_params``."""
    if layout.degree("dp") > 1 == layout.degree("dp_shard") and "dp_shard" in layout.dims:
        yield Problem(
            "topology.dp_shard",
            "fsdp2: dp_shard = 1 shards nothing; expected 2 or more, none to shard over all of dp, or ddp",
        )
    if layout.degree("dp") > 1 and "dtensors" in recipe.precision.unsupported:
        unpacked = "set packed = false, or " if getattr(recipe.precision.config, "packed", False) else ""
        yield Problem(
            "precision",
            f"fsdp2: shards of weights are DTensors, which '{recipe.precision.use}' with these keys declares "
            f"that it does not support, as packed weights that are trained cannot be: {unpacked}take zero12 "
            "in place of fsdp2, or another precision",
        )
    try:
        found = version("torch")
    except PackageNotFoundError:
        return
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers and tuple(map(int, numbers.groups())) < (2, 13):
        number = next(n for n, each in enumerate(recipe.parallel) if each.config is config)
        yield Problem(
            f"parallel.{number}.use",
            f"fsdp2: expected torch 2.13 or later, got {found}; zero12 shards optimizer state and gradients "
            "with any version",
        )


@hookimpl
def nanotrain_register_parallel(register: Register) -> None:
    """Register ``fsdp2``."""
    register(
        Component(
            name="fsdp2",
            config=FSDP2Config,
            factory="nanotrain_fsdp.fully_sharded:FSDP2",
            summary="parameters sharded by torch's fully_shard (ZeRO-3)",
            provides={"gradient_sync"},
            mesh_dims={"dp", "dp_shard"},
            # A layer's gradients are sent when its backward pass ends.
            supports={"w_passes": Support.UNSUPPORTED},
            check=check,
        )
    )
