"""The current pass, as layers may query it: one object per run, which its executor keeps up to date.

Everything that changes how layers compute (a precision, kernels, a schedule that splits the backward pass)
receives it when the run is composed. There is no global state: two runs in one process are independent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager

import torch
from torch import nn

from nanotrain_core.pipeline.weight_gradients import DeferredGradients, WgradFn


class Passes:
    """The current state of a run: between updates, and in a forward or a backward pass."""

    def __init__(self) -> None:
        self.splits_backward = False
        """Whether any backward pass of this run leaves weight gradients to a W pass."""
        self.deferred: DeferredGradients | None = None
        """Where the current backward pass leaves weight gradients for a W pass; None: it computes them."""
        self.computing: Set[nn.Parameter] | None = None
        """In a W pass, the weights whose gradients it computes: those of all others came in the B pass."""
        self.in_backward = False
        """Whether a backward pass is running: a forward of a layer in it is a recomputation, for activation
        checkpointing, and must not count its tokens again."""
        self.counted = True
        """False in passes that are not part of a step: those of validation and generation, and one that is
        repeated for its values alone. Statistics of the step, and those kept over steps, such as the maxima
        of delayed scaling, must not include them, or training depends on whether one evaluates."""
        self.eager = False
        """Whether compiled layers currently run eagerly: a monitor sets it to observe inside them."""
        self.observed = False
        """Whether monitors observe this step's forward passes: these run in Python, without a CUDA graph."""
        self.model_changes = 0
        """Number of changes that phases have made to the model's config: code that caches results of a pass
        (CUDA graphs) compares it."""
        self._version, self._unchanged = 0, False

    @property
    def weights_version(self) -> int | None:
        """Version of the weights: values computed from them stay valid while it is unchanged.

        None between steps, where any code may modify weights. (Megatron passes ``is_first_microbatch`` for
        the same purpose.) A tensor's version does not suffice: collectives write through other views of the
        memory.
        """
        return self._version if self._unchanged else None

    @contextmanager
    def weights_unchanged(self) -> Iterator[None]:
        """Promise that no weight changes within the block: a step's microbatches, or a validation batch."""
        self._version, self._unchanged = self._version + 1, True
        try:
            yield
        finally:
            self._unchanged = False

    @contextmanager
    def backward(self, deferred: DeferredGradients | None = None) -> Iterator[None]:
        """Run a backward pass, which leaves weight gradients to ``deferred`` if given."""
        self.deferred, self.in_backward = deferred, True
        try:
            yield
        finally:
            self.deferred, self.in_backward = None, False

    def compute_weight_gradients(self, deferred: DeferredGradients) -> None:
        """Run a W pass: compute what a backward pass left to ``deferred``."""
        self.computing = frozenset(deferred.waiting)
        try:
            deferred.compute()
        finally:
            self.computing = None

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Run passes that are not part of a step: its statistics do not include them."""
        self.counted = False
        try:
            yield
        finally:
            self.counted = True

    def defers(self, weight: torch.Tensor) -> bool:
        """Return whether the gradient of ``weight`` is left to a W pass now."""
        return self.deferred is not None and isinstance(weight, nn.Parameter)

    def weight_gradient(
        self, weight: torch.Tensor, wgrad: WgradFn, defer: Callable[[], WgradFn] | None = None
    ) -> torch.Tensor | None:
        """Return ``wgrad()``, the gradient of ``weight``, or None if it was left to a W pass.

        For the backward pass of an autograd function: return what this returns.

        Args:
            weight: the weight of the layer.
            wgrad: computes its gradient.
            defer: returns a function that computes it in the W pass and holds less memory until then; None:
                ``wgrad`` is kept.
        """
        if self.deferred is not None and isinstance(weight, nn.Parameter):
            self.deferred.add(weight, wgrad if defer is None else defer())
            return None
        return wgrad()
