"""Activation checkpointing (recompute): layers keep only their input; backward runs their forward pass again.

Of a layer only its input [B, S, D] is kept: the memory of one layer at a time for a third more computing.

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174; torch's
``torch.utils.checkpoint``, not reentrant, does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nanotrain_core.builtin.configs import RecomputeConfig
from nanotrain_core.contracts import Parallel
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import Placements
from nanotrain_core.layout.roles import Role, tagged, take_over, taken_over_by


class Recompute(Parallel):
    """The ``recompute`` component. See :class:`~nanotrain_core.contracts.Parallel`."""

    def __init__(self, config: RecomputeConfig) -> None:
        self.config = config

    def apply(self, part: nn.Module, placements: Placements, mesh: Mesh) -> nn.Module:
        """Checkpoint the activations of modules of role BLOCK; placements stay as they are."""
        recompute_blocks(part, every=self.config.every)
        return part


def recompute_blocks(part: nn.Module, *, every: int = 1) -> None:
    """Checkpoint the activations of the first module of role BLOCK and each ``every``-th after it."""
    for number, block in enumerate(blocks(part)):
        if number % every == 0:
            take_over(block, partial(recompute, taken_over_by(block)))


def blocks(part: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of role BLOCK that are in no other."""
    inside = "\0"
    for name, module, tag in tagged(part):
        if tag.role is Role.BLOCK and not name.startswith(inside):
            inside = f"{name}."
            yield module


def recompute(before: Callable[..., Any] | None, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call ``block`` as it was called ``before``, by its own class if by none, and keep its input alone."""
    forward = partial(before or type(block).forward, block)
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
