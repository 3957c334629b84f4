"""Context parallelism: ranks share each sequence, and communicate around attention.

The plugin's entry module: every ``nanotrain`` command imports it, so it never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm
from typing import TYPE_CHECKING, Literal

import attrs

from nanotrain_core.api import (
    Component,
    Problem,
    Register,
    Role,
    StaysEager,
    cached_token_of,
    divisibility_of,
    hookimpl,
)

if TYPE_CHECKING:
    from nanotrain_core.api import Layout, Recipe

__version__ = "0.1.0"

#: Why a model is refused whose windows are smaller than a sequence.
NO_WINDOW = '"ring" has no sliding window; expected "all_to_all" or "all_gather"'


@attrs.define(frozen=True, kw_only=True)
class ContextParallelConfig:
    """``[[parallel]] use = "cp"``, with ``[topology] cp``."""

    communication: Literal["all_to_all", "all_gather", "ring"] = "all_to_all"
    """What ranks exchange around attention: ``all_to_all``, tokens for heads, which ``cp`` must divide;
    ``all_gather``, keys and values, for any number of heads; ``ring``, the same, a block at a time."""


def check(recipe: Recipe, config: ContextParallelConfig, layout: Layout) -> Iterator[Problem]:
    """Check heads, which all-to-alls divide, and windows, which a ring has not."""
    cp, tp = layout.degree("cp"), layout.degree("tp")
    if config.communication == "ring" and cp > 1:
        cached = cached_token_of(recipe.model.config)
        if cached and cached.sliding and cached.window < recipe.batch.length:
            number = next(n for n, each in enumerate(recipe.parallel) if each.config is config)
            yield Problem(f"parallel.{number}.communication", NO_WINDOW)
    if config.communication != "all_to_all":
        return
    # Heads are those which tensor parallelism leaves each rank, or repeats there.
    for extent in divisibility_of(recipe.model.config) or ():
        heads = (lcm(extent.units, tp) if extent.grouped else extent.units) // tp
        if extent.heads and heads % cp:
            problem = extent.problem("tp x cp" if tp > 1 else "cp", tp * cp)
            text = f'{problem.message}; or write communication = "all_gather" in [[parallel]] use = "cp"'
            yield attrs.evolve(problem, message=text)


def stays_eager(recipe: Recipe, config: ContextParallelConfig, layout: Layout) -> Iterator[StaysEager]:
    """Declare that layers with more than one rank are not compiled."""
    if layout.degree("cp") > 1:
        yield StaysEager(Role.BLOCK, "ranks that share a sequence communicate around attention")


@hookimpl
def nanotrain_register_parallel(register: Register) -> None:
    """Register ``cp``."""
    register(
        Component(
            name="cp",
            config=ContextParallelConfig,
            factory="nanotrain_cp.context_parallel:ContextParallel",
            summary="splits sequences over ranks, by all-to-all, all-gather or a ring around attention",
            mesh_dims={"cp"},
            check=check,
            stays_eager=stays_eager,
        )
    )
