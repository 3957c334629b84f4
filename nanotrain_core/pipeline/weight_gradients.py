"""Deferred weight-gradient GEMMs: the W passes of zero-bubble schedules.

A linear layer's backward pass runs two GEMMs. The gradient of its input (dgrad) is on the critical path:
the previous pipeline stage needs it, or the ranks that must reduce it. The gradient of its weight (wgrad) is
needed only at the end of the step, so a schedule may choose when to compute it.

Source of the split: Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, section 2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import nn

#: Computes the gradient of a weight.
WgradFn = Callable[[], torch.Tensor]


class DeferredGradients:
    """The deferred weight-gradient GEMMs of one backward pass."""

    def __init__(self) -> None:
        self.waiting: dict[nn.Parameter, deque[WgradFn]] = {}
        """By weight, in the order in which the backward pass reached them; :meth:`compute` empties it."""

    def add(self, weight: nn.Parameter, wgrad: WgradFn) -> None:
        """Defer the gradient of ``weight``."""
        self.waiting.setdefault(weight, deque()).append(wgrad)

    def compute(self) -> None:
        """Compute all of them and accumulate the results, as backward would have, hooks included.

        Hooks notify a gradient sync that a microbatch's gradient of a weight is complete. For a weight that
        the pass used several times, only the last product runs them.
        """
        for weight in [*self.waiting]:
            wgrads = self.waiting.pop(weight)
            while wgrads:
                with torch.no_grad():  # as in a backward pass
                    gradient = wgrads.popleft()()
                if wgrads:
                    accumulate(weight, gradient)
                else:
                    weight.backward(gradient)  # type: ignore[no-untyped-call]


@torch.no_grad()
def accumulate(weight: nn.Parameter, gradient: torch.Tensor) -> None:
    """Add to the ``grad`` of ``weight`` in its dtype, as autograd does, without its hooks."""
    if weight.grad is None:
        weight.grad = gradient.to(weight.grad_dtype or gradient.dtype, copy=True)
    else:
        weight.grad.add_(gradient)
