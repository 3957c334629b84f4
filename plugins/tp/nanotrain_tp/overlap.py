"""Overlaps the reduction of an input's gradient (dgrad) over ranks with the wgrad GEMMs.

In backward each layer that reads a tensor computes a dgrad and a wgrad. Other ranks need only the sum of the
dgrads. Autograd runs ready nodes in the reverse order of forward, so the order of forward is::

    gather   backward: wait for the sum, and pass it on
    places   backward: the wgrad GEMMs, one place for each layer
    enter    backward: begin to sum
    layers   backward: the dgrad GEMMs; autograd adds them up for `enter`

Only the time depends on that order. An edge in the graph makes a place run after its layer, and
the collectives of all ranks have one order, since their graphs are the same.

Sources: Megatron-LM's ``LinearWithGradAccumulationAndAsyncCommunication``; the order is that of PyTorch's
autograd engine, which takes the highest ``sequence_nr`` first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from nanotrain_core.api.torch import Pending
from nanotrain_tp.collectives import Ranks


class OverlappedInput:
    """The input of sharded layers: all-gathered if it is split, with an asynchronous reduction in backward.

    :meth:`gather`, the layers' places and :meth:`enter` follow each other in forward: see the module.
    """

    def __init__(self, ranks: Ranks, dim: int | None, length: int | None = None) -> None:
        """``dim``: the dimension of its shares, which make up ``length``; None: it is whole."""
        self.ranks, self.dim, self.length = ranks, dim, length
        self._under_way: list[Pending] = []
        self._gathering: Pending | None = None
        self._gathered: torch.Tensor | None = None
        self._waiting = 0
        self._to_come = 0
        """Layers that read the input in forward and have not asked for it in backward."""

    def gather(self, x: torch.Tensor, known: torch.Tensor | None) -> torch.Tensor:
        """Return the whole ``x``, for :meth:`enter`. ``known``: the result, if it was gathered before."""
        gathered: torch.Tensor = _Gather.apply(x, self, known)  # type: ignore[no-untyped-call]
        return gathered

    def enter(self, gathered: torch.Tensor) -> torch.Tensor:
        """Return the input of the sharded layers, whose gradient is partial on every rank."""
        inside: torch.Tensor = _Enter.apply(gathered, self)  # type: ignore[no-untyped-call]
        return inside

    def begin(self, d_x: torch.Tensor) -> None:
        """Begin to all-reduce or reduce-scatter every rank's ``d_x``."""
        begin = self.ranks.begin_all_reduce
        pending = begin(d_x) if self.dim is None else self.ranks.begin_reduce_scatter(d_x, self.dim)
        self._under_way.append(pending)

    def expect_reader(self) -> None:
        """Count a layer that will call :meth:`gather_again`."""
        self._to_come += 1

    def gather_again(self, share: torch.Tensor) -> Pending:
        """Begin to all-gather the input again in backward; once for all layers that read it.

        It is kept until the last of them has it. One that never asks, since its output has no gradient, keeps
        it as long as the graph.
        """
        if self._gathering is None:
            assert self.dim is not None
            self._gathering = self.ranks.begin_all_gather(share, self.dim, self.length)
        self._to_come -= 1
        self._waiting += 1
        return self._take

    def _take(self) -> torch.Tensor:
        assert self._gathering is not None
        whole = self._gathering() if self._gathered is None else self._gathered
        self._waiting -= 1
        again = self._waiting > 0 or self._to_come > 0
        self._gathered = whole if again else None
        self._gathering = self._gathering if again else None
        return whole

    def end(self) -> torch.Tensor:
        """Wait for the sum, or this rank's share of it."""
        return self._under_way.pop()()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, overlapped: OverlappedInput, known: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.overlapped = overlapped
        if overlapped.dim is None:
            return x.view_as(x)
        if known is not None:
            return known.view_as(known)
        return overlapped.ranks.all_gather(x, overlapped.dim, overlapped.length)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_gathered: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.overlapped.end(), None, None


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gathered: torch.Tensor, overlapped: OverlappedInput) -> torch.Tensor:
        ctx.overlapped = overlapped
        return gathered.view_as(gathered)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.overlapped.begin(d_x)
        return d_x.new_zeros(()).expand_as(d_x), None  # a shape without memory: `gather` has the sum
