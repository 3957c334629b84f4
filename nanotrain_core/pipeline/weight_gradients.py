"""Lets the product for a weight's gradient wait while something more urgent goes on.

A linear layer's backward pass makes two products. The gradient of its input is what others wait for: the
pipeline stage before, or the ranks that must add it up. The gradient of its weight is needed only at
the end of the step. Layers that ask :func:`weight_gradient` let others choose the moment: a later pass
(:class:`Postponed`), or a later place in the same one (:class:`Place`).

Source of the split: Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, section 2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable

Product = Callable[[], torch.Tensor]


class Postponed:
    """Products that wait to be computed."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[nn.Parameter, Product]] = deque()

    def add(self, weight: nn.Parameter, product: Product) -> None:
        """Put off the gradient of ``weight``."""
        self._waiting.append((weight, product))
        _pending[weight] = _pending.get(weight, 0) + 1

    def compute(self) -> None:
        """Make all products and accumulate them, as backward would have, hooks included."""
        while self._waiting:
            weight, product = self._take()
            with torch.no_grad():  # as a backward pass is
                gradient = product()
            weight.backward(gradient)  # type: ignore[no-untyped-call]

    def forget(self) -> None:
        """Leave uncomputed what a step that was broken off has put off."""
        while self._waiting:
            self._take()

    def _take(self) -> tuple[nn.Parameter, Product]:
        weight, product = self._waiting.popleft()
        _pending[weight] -= 1
        if not _pending[weight]:
            del _pending[weight]  # or it would keep a finished run's weights, and all that hangs on them
        return weight, product


_open: list[Postponed] = []
_pending: dict[nn.Parameter, int] = {}
_used = [False]


def use() -> None:
    """Announce that gradients will be postponed in this process: layers may ask :func:`in_use`."""
    _used[0] = True


def in_use() -> bool:
    """Say whether a layer must make its own backward pass for :func:`weight_gradient` to be asked."""
    return _used[0]


def is_pending(weight: nn.Parameter) -> bool:
    """Say whether a gradient of ``weight`` waits: autograd calls its hooks even when it got none."""
    return _pending.get(weight, 0) > 0


@contextmanager
def postpone(into: Postponed) -> Iterator[None]:
    """Put off, while this lasts, what backward passes ask :func:`weight_gradient` for."""
    _open.append(into)
    try:
        yield
    finally:
        _open.pop()


def is_postponing(weight: torch.Tensor) -> bool:
    """Say whether :func:`weight_gradient` would put off the gradient of ``weight`` now."""
    return bool(_open) and isinstance(weight, nn.Parameter)


def weight_gradient(
    weight: torch.Tensor, product: Product, place: Place | None = None
) -> torch.Tensor | None:
    """Return ``product()``, the gradient of ``weight``, or None if it was put off, or left at ``place``.

    For the backward pass of an autograd function: return what this returns.
    """
    if is_postponing(weight):
        _open[-1].add(cast(nn.Parameter, weight), product)
        return None
    if place is not None:
        place.left.append(product)
        return None
    return product()


# --- added where the sum is ---------------------------------------------------------------------

_adding = [False]


@contextmanager
def add_in_place() -> Iterator[None]:
    """Let layers add to the ``grad`` of their weights themselves, while this lasts.

    For backward passes that are to add gradients up there, and whose gradients nobody else asks for.
    """
    before, _adding[0] = _adding[0], True
    try:
        yield
    finally:
        _adding[0] = before


def sum_of(weight: torch.Tensor) -> torch.Tensor | None:
    """Return what a layer may add the gradient of ``weight`` to, in place of returning it; None: return it.

    Making a product and then adding it moves three times the memory of a product that adds. What waits for
    the gradient to be complete is told all the same, as of one that was put off.
    """
    may = _adding[0] and weight.is_leaf and not weight._backward_hooks and not is_postponing(weight)
    total = weight.grad if may else None
    if total is None or total.dtype != weight.dtype or total.layout != torch.strided:
        return None
    return total if total.is_contiguous() else None


# --- a later place in the same backward pass ----------------------------------------------------


#: A tensor to keep for backward, and what begins there to make the input of it and returns what waits for it.
Again = tuple[torch.Tensor, Callable[[torch.Tensor], Product]]


class Place:
    """Where in a backward pass one use of a weight has the product for its gradient made.

    Autograd runs what is ready in the reverse order of forward. Who makes a place, then begins something,
    and then calls the layer, has in backward the layer's other product first, what that beginning's
    backward does next, and this product after it.
    """

    def __init__(self, weight: torch.Tensor, again: Again | None = None) -> None:
        """``again``: how the layer gets its input in backward, in place of keeping it."""
        self.again = again
        self.left: list[Product] = []
        self.handle: torch.Tensor = _Make.apply(weight, self.left)  # type: ignore[no-untyped-call]
        """An input of the layer's autograd function, which returns no gradient for it."""


class _Make(torch.autograd.Function):
    """Forward: a handle. Backward: the product that was left, if one was."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, left: list[Product]) -> torch.Tensor:
        ctx.left = left
        ctx.set_materialize_grads(False)
        return weight.new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_handle: None) -> tuple[torch.Tensor | None, None]:
        return ctx.left.pop()() if ctx.left else None, None


_ATTRIBUTE = "nanotrain_place"


def give_place(module: nn.Module, place: Place | None) -> None:
    """Have the next call of ``module`` leave its product there, if it is a layer that can."""
    setattr(module, _ATTRIBUTE, place)


def take_place(module: nn.Module) -> Place | None:
    """Return what :func:`give_place` was given for this call of ``module``."""
    place: Place | None = vars(module).pop(_ATTRIBUTE, None)
    return place
