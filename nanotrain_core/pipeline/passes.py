"""What layers may ask of the pass that they are in: one object of a run, which its executor keeps up to date.

Whoever changes how layers compute (a precision, kernels, a schedule that splits the backward pass) is handed
it when the run is composed. Nothing of it is global: two runs in one process know nothing of one another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from nanotrain_core.pipeline.weight_gradients import DeferredGradients, Product


class Passes:
    """Where a run is: between updates, and in a forward or a backward pass."""

    def __init__(self) -> None:
        self.splits_backward = False
        """Whether any backward pass of this run leaves weight gradients to a W pass."""
        self.deferred: DeferredGradients | None = None
        """Where the backward pass under way leaves them."""
        self.in_backward = False
        """Whether a backward pass is under way: a forward of a layer in it is a recomputation, for activation
        checkpointing, and must not count its tokens again."""
        self.eager = False
        """Whether compiled layers run eager meanwhile: a monitor sets it to look inside of them."""
        self._number, self._open = 0, False

    @property
    def weights_version(self) -> int | None:
        """Version of the weights: what was computed from them is valid while it stays the same.

        None between steps, where anybody may write to weights. (Megatron passes ``is_first_microbatch`` for
        the same end.) A tensor's version does not tell: collectives write through other views of the memory.
        """
        return self._number if self._open else None

    @contextmanager
    def weights_unchanged(self) -> Iterator[None]:
        """Promise that no weight changes while this lasts: a step's microbatches, or a validation batch."""
        self._number, self._open = self._number + 1, True
        try:
            yield
        finally:
            self._open = False

    @contextmanager
    def backward(self, deferred: DeferredGradients | None = None) -> Iterator[None]:
        """Run a backward pass, which leaves weight gradients to ``deferred`` if there is one."""
        self.deferred, self.in_backward = deferred, True
        try:
            yield
        finally:
            self.deferred, self.in_backward = None, False

    def defers(self, weight: torch.Tensor) -> bool:
        """Return whether the gradient of ``weight`` is left to a W pass now."""
        return self.deferred is not None and isinstance(weight, nn.Parameter)

    def weight_gradient(self, weight: torch.Tensor, wgrad: Product) -> torch.Tensor | None:
        """Return ``wgrad()``, the gradient of ``weight``, or None if it was left to a W pass.

        For the backward pass of an autograd function: return what this returns.
        """
        if self.deferred is not None and isinstance(weight, nn.Parameter):
            self.deferred.add(weight, wgrad)
            return None
        return wgrad()
