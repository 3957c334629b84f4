"""Tensor parallelism: ranks shard every layer, and with sequence parallelism the tokens in between.

The plugin's entry module: every ``nanotrain`` command imports it, so it never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

import attrs

from nanotrain_core.api import (
    Component,
    Problem,
    Register,
    Role,
    divisibility_of,
    hookimpl,
    indivisible,
    too_few_units,
)

if TYPE_CHECKING:
    from nanotrain_core.api import Layout, Recipe

__version__ = "0.1.0"


@attrs.define(frozen=True, kw_only=True)
class TensorParallelConfig:
    """``[[parallel]] use = "tp"``, with ``[topology] tp``."""

    NOT_KEYS: ClassVar[Mapping[str, str]] = {
        "shared_memory": 'it is kernels.shared_memory, of [kernels] use = "cpu", for the whole run',
    }

    sequence_parallel: bool = True
    """Shard the activations between the sharded layers too, along the sequence: they take 1/tp of the
    memory."""
    overlap: bool = True
    """In backward, overlap the reduction of dgrads over ranks with the wgrad GEMMs; not through
    shared memory, where the cores that would sum are those that compute."""
    gather_again: bool = False
    """With sequence parallelism, save only a shard of the layers' inputs, and all-gather them again in
    backward: 1/tp of their memory for one more collective, which overlaps with the dgrad GEMMs."""


#: The axis along which each parameter of a role is sharded.
AXES: dict[Role, dict[str, int]] = {
    Role.VOCAB: {"weight": 0},
    Role.COLUMN: {"weight": 0, "bias": 0},
    Role.ROW: {"weight": 1},
    Role.HEAD: {"weight": 0},
}


#: Roles whose rows need not divide: shard sizes may differ by one.
VOCABULARY = (Role.VOCAB, Role.HEAD)


def check(recipe: Recipe, config: TensorParallelConfig, layout: Layout) -> Iterator[Problem]:
    """Check that layers divide and every rank gets tokens, as far as the recipe alone determines it."""
    tp = layout.degree("tp")
    cp = layout.degree("cp")
    if tp == 1:
        return
    if config.sequence_parallel and "sequence_parallel" in recipe.model.unsupported:
        wrapper = next(n for n, each in enumerate(recipe.parallel) if each.config is config)
        yield Problem(
            f"parallel.{wrapper}.sequence_parallel",
            f"model '{recipe.model.use}' declares that it is not supported: its layers need whole sequences; "
            "write sequence_parallel = false",
        )
    yield from indivisible(recipe.model.config, {*AXES} - {*VOCABULARY}, "tp", tp)
    yield from too_few_units(recipe.model.config, VOCABULARY, "tp", tp)
    length, reason = recipe.batch.length, _needs_shares(recipe, config)
    if reason and length < tp * cp:
        ranks = f"tp = {tp}" if cp == 1 else f"tp x cp = {tp} x {cp}"
        text = (
            f"{length} tokens are fewer than {ranks} ranks, each of which takes a share of them for {reason}"
        )
        yield Problem("batch.length", f"{text}; nearest: {tp * cp}")


def _needs_shares(recipe: Recipe, config: TensorParallelConfig) -> str:
    """Return what needs a shard of every sequence on each rank; empty if nothing does."""
    if config.sequence_parallel:
        return "sequence_parallel"
    divisibility = divisibility_of(recipe.model.config) or ()
    return "its experts" if any(Role.EXPERTS in extent.roles for extent in divisibility) else ""


@hookimpl
def nanotrain_register_parallel(register: Register) -> None:
    """Register ``tp``."""
    register(
        Component(
            name="tp",
            config=TensorParallelConfig,
            factory="nanotrain_tp.tensor_parallel:TensorParallel",
            summary="splits layers by role, and sequences between them",
            mesh_dims={"tp"},
            check=check,
        )
    )
