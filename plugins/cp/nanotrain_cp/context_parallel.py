"""Wraps attention and routers of a model whose ranks share each sequence.

Only attention may mix tokens, besides routers. A model that mixes them elsewhere, as by a convolution over
tokens, trains wrong, and nothing tells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from nanotrain_core.api import NanotrainError, Role, override_forward, tagged
from nanotrain_core.api.torch import Batch, Mesh, Parallel, Placements, Routing, tokens_per_expert
from nanotrain_cp import ContextParallelConfig, all_gather, all_to_all, ring
from nanotrain_cp.collectives import Gather, Ranks

#: How attention communicates, by the name in the recipe.
ATTEND = {"all_to_all": all_to_all.attend, "all_gather": all_gather.attend, "ring": ring.attend}


class ContextParallel(Parallel):
    """The ``cp`` component."""

    def __init__(self, config: ContextParallelConfig) -> None:
        self.communicate = ATTEND[config.communication]
        self.length: int | None = None
        """Tokens of the whole sequences; None if each rank has whole ones, as where text is sampled."""
        self.calls = 0

    def op_wrappers(self, mesh: Mesh) -> Mapping[str, Callable[..., torch.Tensor]]:
        """Wrap the attention of models."""
        return {"attention": self.attend} if mesh.layout.size(*mesh.layout.sequence_dims) > 1 else {}

    def apply(self, part: nn.Module, placements: Placements, mesh: Mesh) -> nn.Module:
        """Let routers see whole sequences, and find out whether layers call the attention of the table.

        Raises:
            NanotrainError: in the first step, layers have not called it: no token saw those of other ranks.
        """
        if self.op_wrappers(mesh):
            self.ranks, modules = Ranks(mesh), [(module, tag.role) for _, module, tag in tagged(part)]
            for module, role in modules:
                if role is Role.ROUTER:
                    override_forward(module, self.route)
            blocks = [role for _, role in modules].count(Role.BLOCK)
            part.register_forward_pre_hook(lambda part, args: self.begin(args[1]))
            part.register_forward_hook(lambda part, *_: self.end(blocks * part.training))
        return part

    def begin(self, batch: Batch) -> None:
        """Note which sequences a forward pass is of."""
        self.length, self.calls = None if batch.whole is None else batch.length, 0

    def end(self, blocks: int) -> None:
        """Raise an error if layers have not called attention."""
        if self.calls < blocks:
            raise NanotrainError(f"cp: {blocks} layers called attention of their ops {self.calls} times")

    def attend(self, attention: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        """Attend to all tokens of each sequence."""
        self.calls += 1
        if self.length is None:
            return attention(*args)
        return self.communicate(self.ranks, self.length, attention, *args)

    def route(self, router: nn.Module, x_BsD: torch.Tensor) -> Routing:
        """Route whole sequences, of which balance losses are; keep the choices for this rank's tokens."""
        whole = x_BsD
        if self.length is not None:
            whole = Gather.apply(x_BsD, self.ranks, self.length)  # type: ignore[no-untyped-call]
        routing: Routing = type(router).forward(router, whole)
        if self.length is None:
            return routing
        own = slice(*self.ranks.edges(self.length)[self.ranks.index])
        experts, weights = routing.experts[:, own], routing.weights[:, own]
        load = None if routing.load is None else tokens_per_expert(experts, len(routing.load))
        return replace(routing, experts=experts, weights=weights, load=load)
