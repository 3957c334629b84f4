"""Sequence parallelism for ``sliced``: between sharded layers, each rank has a share of each sequence.

Shares may differ by a token. Collectives are all-reduces of tensors padded with zeros, without optimizations.
Every gradient that is not sharded is partial, except a router's, which sees whole sequences on every rank.

Source: Korthikanti et al., arXiv 2205.05198, section 4.2.

Shapes: B batch, S whole sequence, s this rank's share of it, D width, K experts chosen per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from nanotrain_core.batch import Batch
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.roles import Role, Tag, share_tokens
from nanotrain_core.moe.routing import Routing

#: The dimension of tokens [B, S, ...].
SEQUENCE = 1

Args = tuple[Any, ...]
Change = Callable[[torch.Tensor], torch.Tensor]


class _Apply(torch.autograd.Function):
    """One function forward, another backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Change, backward: Change) -> torch.Tensor:
        ctx.change = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, d_x: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.change(d_x), None, None


class SlicedTokens:
    """The hooks of a model part whose sequences are split over ``tp``, by role."""

    def __init__(self, part: nn.Module, mesh: Mesh) -> None:
        self.mesh = mesh
        self.length = 0
        """S of this rank's part of sequences (all, without context parallelism): a share does not tell."""
        part.register_forward_pre_hook(self._begin, with_kwargs=True)

    def _begin(self, part: nn.Module, args: Args, kwargs: dict[str, Any]) -> None:
        batch = next(each for each in (*args, *kwargs.values()) if isinstance(each, Batch))
        self.length = batch.tokens.shape[1]

    # --- what tokens do ------------------------------------------------------------------------------

    def _range(self) -> tuple[int, int]:
        """Return the first token of this rank's share, and how many there are."""
        ranks, index = self.mesh.size("tp"), self.mesh.coordinate("tp")
        first, end = (self.length * each // ranks for each in (index, index + 1))
        return first, end - first

    def _own(self, x: torch.Tensor, dim: int = SEQUENCE) -> torch.Tensor:
        return x.narrow(dim, *self._range()).clone(memory_format=torch.contiguous_format)

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        self.mesh.all_reduce(total, "tp")
        return total

    def _join(self, x: torch.Tensor, dim: int = SEQUENCE) -> torch.Tensor:
        """Return whole sequences from every rank's share."""
        sizes = list(x.shape)
        sizes[dim] = self.length
        whole = x.new_zeros(sizes)
        whole.narrow(dim, *self._range()).copy_(x)
        self.mesh.all_reduce(whole, "tp")
        return whole

    def _sum_own(self, x: torch.Tensor) -> torch.Tensor:
        return self._own(self._sum(x))

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Return whole sequences for sharded layers, whose gradients of them are partial."""
        return _apply(x, self._join, self._sum_own)

    def leave(self, y: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of the sum of partial outputs."""
        return _apply(y, self._sum_own, self._join)

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """Return whole sequences for what every rank computes alike."""
        return _apply(x, self._join, self._own)

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of what every rank has computed alike."""
        return _apply(x, self._own, self._join)

    # --- hooks ---------------------------------------------------------------------------------------

    def hook(self, module: nn.Module, tag: Tag) -> None:
        """Install what a role's module needs."""
        match tag.role:
            case Role.VOCAB:
                module.register_forward_hook(lambda module, args, output: output.narrow(1, *self._range()))
            case Role.POSITION:  # vectors [S, D] or [B, S, D]
                module.register_forward_hook(
                    lambda module, args, output: output.narrow(output.dim() - 2, *self._range())
                )
            case Role.COLUMN | Role.SHARED:
                module.register_forward_pre_hook(lambda module, args: (self.enter(args[0]), *args[1:]))
            case Role.ROW:
                module.register_forward_hook(self._after_row)
            case Role.ROUTER:
                module.register_forward_pre_hook(lambda module, args: (self.whole(args[0]), *args[1:]))
                module.register_forward_hook(self._after_router)
            case Role.EXPERTS:
                share_tokens(module, "tp")
            case Role.HEAD:
                module.register_forward_pre_hook(self._before_head)
                module.register_forward_hook(self._after_head)

    def _after_row(self, module: nn.Module, args: Args, output: torch.Tensor) -> torch.Tensor:
        bias: Any = getattr(module, "bias", None)
        return self.leave(output) if bias is None else self.leave(output - bias) + bias

    def _after_router(self, module: nn.Module, args: Args, routing: Routing) -> Routing:
        """Keep the choices of this rank's tokens; losses are of whole sequences, and loads counted alike."""
        return replace(routing, experts=self._own(routing.experts), weights=self.own(routing.weights))

    def _before_head(self, module: nn.Module, args: Args) -> Args:
        x, targets, *more = args
        return (x, targets if targets is None else self._own(targets), *more)

    def _after_head(self, module: nn.Module, args: Args, output: torch.Tensor) -> torch.Tensor:
        """Return the loss of all ranks' tokens, or logits of whole sequences."""
        return _apply(output, self._join if args[1] is None else self._sum, lambda d_output: d_output)


def _apply(x: torch.Tensor, forward: Change, backward: Change) -> torch.Tensor:
    result: torch.Tensor = _Apply.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return result
