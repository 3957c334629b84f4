"""Expert parallelism: each rank holds some experts, or shards of them, and tokens are sent to them.

The plugin's entry module: every ``nanotrain`` command imports it, so it never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs

from nanotrain_core.api import (
    Component,
    Problem,
    Register,
    Role,
    StaysEager,
    divisibility_of,
    hookimpl,
    indivisible,
)

if TYPE_CHECKING:
    from nanotrain_core.api import Layout, Recipe

__version__ = "0.1.0"


@attrs.define(frozen=True, kw_only=True)
class ExpertParallelConfig:
    """``[[parallel]] use = "ep_deepseek"``: no keys. Degrees are the topology's ``ep`` and ``etp``."""


def check(recipe: Recipe, config: ExpertParallelConfig, layout: Layout) -> Iterator[Problem]:
    """Check that there are experts, and that they divide, as far as the recipe alone determines it."""
    divisibility = divisibility_of(recipe.model.config)
    none = divisibility is not None and not any(Role.EXPERTS in extent.roles for extent in divisibility)
    for dim in ("ep", "etp"):
        degree = layout.degree(dim)
        if degree > 1 and none:
            text = f"{dim} = {degree}, but model '{recipe.model.use}' has no experts; expected 1"
            yield Problem(f"topology.{dim}", text)
        yield from indivisible(recipe.model.config, {Role.EXPERTS}, dim, degree, width=dim == "etp")


def stays_eager(recipe: Recipe, config: ExpertParallelConfig, layout: Layout) -> Iterator[StaysEager]:
    """Yield that experts sharded over ranks stay eager: the host counts their rows in every layer."""
    if layout.degree("ep", "etp") > 1:
        yield StaysEager(Role.EXPERTS, "the host must learn how many rows travel before it can send them")


@hookimpl
def nanotrain_register_parallel(register: Register) -> None:
    """Register ``ep_deepseek``."""
    register(
        Component(
            name="ep_deepseek",
            config=ExpertParallelConfig,
            factory="nanotrain_ep_deepseek.expert_parallel:ExpertParallel",
            summary="experts sharded over ranks, tokens dispatched by all-to-all, none dropped",
            mesh_dims={"ep", "etp"},
            check=check,
            stays_eager=stays_eager,
        )
    )
