"""Tensor parallelism: ranks share every layer, and with sequence parallelism the tokens in between.

This is the plugin's face: every ``nanotrain`` command imports it, so it never imports torch.
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
    too_few,
    undivided,
)

if TYPE_CHECKING:
    from nanotrain_core.api import Layout, Recipe

__version__ = "0.1.0"


@attrs.define(frozen=True, kw_only=True)
class TensorParallelConfig:
    """``[[parallel]] use = "tp"``, with ``[topology] tp``."""

    NOT_KEYS: ClassVar[Mapping[str, str]] = {
        "shared_memory": 'it is kernels.shared_memory now, of [kernels] use = "cpu", for the whole run',
    }

    sequence_parallel: bool = True
    """Split what lies between the split layers too, along the sequence: it takes 1/tp of the memory."""
    overlap: bool = True
    """In backward, sum inputs' gradients over ranks while each computes its weights' gradients; not through
    shared memory, where the cores that would sum are those that compute."""
    gather_again: bool = False
    """With sequence parallelism, keep a share of what layers read, and gather it again in backward: 1/tp of
    its memory for one more collective, which overlaps with the dgrad GEMMs."""


#: The axis along which each parameter of a role is split.
AXES: dict[Role, dict[str, int]] = {
    Role.VOCAB: {"weight": 0},
    Role.COLUMN: {"weight": 0, "bias": 0},
    Role.ROW: {"weight": 1},
    Role.HEAD: {"weight": 0},
}


#: Roles whose rows need not divide: ranks' shares may differ by one.
VOCABULARY = (Role.VOCAB, Role.HEAD)


def check(recipe: Recipe, config: TensorParallelConfig, layout: Layout) -> Iterator[Problem]:
    """Check that layers divide and every rank gets tokens, as far as the recipe alone can tell."""
    tp = layout.size("tp") if "tp" in layout.dims else 1
    cp = layout.size("cp") if "cp" in layout.dims else 1
    if tp == 1:
        return
    yield from undivided(recipe.model.config, {*AXES} - {*VOCABULARY}, "tp", tp)
    yield from too_few(recipe.model.config, VOCABULARY, "tp", tp)
    length, reason = recipe.batch.length, _needs_shares(recipe, config)
    if reason and length < tp * cp:
        ranks = f"tp = {tp}" if cp == 1 else f"tp x cp = {tp} x {cp}"
        text = (
            f"{length} tokens are fewer than {ranks} ranks, each of which takes a share of them for {reason}"
        )
        yield Problem("batch.length", f"{text}; nearest: {tp * cp}")


def _needs_shares(recipe: Recipe, config: TensorParallelConfig) -> str:
    """Return what each rank takes a share of every sequence for; empty if none does."""
    if config.sequence_parallel:
        return "sequence_parallel"
    divisibility = divisibility_of(recipe.model.config) or ()
    return "its experts" if any(Role.EXPERTS in extent.roles for extent in divisibility) else ""


@hookimpl
def nanotrain_register_parallel(register: Register) -> None:
    """Announce ``tp``."""
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
