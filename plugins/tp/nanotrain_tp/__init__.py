"""Tensor parallelism: ranks share every layer, and with sequence parallelism the tokens in between.

This is the plugin's face: every ``nanotrain`` command imports it, so it never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs

from nanotrain_core import hookimpl
from nanotrain_core.component import Component
from nanotrain_core.errors import Problem
from nanotrain_core.hookspecs import Register

if TYPE_CHECKING:
    from nanotrain_core.layout import Layout
    from nanotrain_core.recipe.tree import Recipe

__version__ = "0.1.0"


@attrs.define(frozen=True, kw_only=True)
class TensorParallelConfig:
    """``[[parallel]] use = "tp"``, with ``[topology] tp``."""

    sequence_parallel: bool = True
    """Split what lies between the split layers too, along the sequence: it takes 1/tp of the memory."""


def check(recipe: Recipe, config: TensorParallelConfig, layout: Layout) -> Iterator[Problem]:
    """Check that sequences divide, as far as the recipe alone can tell."""
    tp = layout.size("tp") if "tp" in layout.dims else 1
    cp = layout.size("cp") if "cp" in layout.dims else 1
    length, unit = recipe.batch.length, tp * cp
    if config.sequence_parallel and tp > 1 and length % unit:
        low = length // unit * unit
        nearest = f"{low} or {low + unit}" if low else str(unit)
        shares = f"tp = {tp}" if cp == 1 else f"tp x cp = {tp} x {cp}"
        text = f"{length} tokens do not divide by {shares}, which sequence_parallel needs; nearest: {nearest}"
        yield Problem("batch.length", text)


@hookimpl
def nanotrain_register_parallel(register: Register) -> None:
    """Announce ``tp``."""
    register(
        Component(
            name="tp",
            config=TensorParallelConfig,
            factory="nanotrain_tp.wrapper:TensorParallel",
            summary="splits layers by their roles, and the sequence between them",
            mesh_dims={"tp"},
            check=check,
        )
    )
