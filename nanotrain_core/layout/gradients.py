"""Where gradients live between backward and the optimizer.

``LocalGradients`` is the plain case, one rank or only replicas that agree. Data-parallel plugins
build on it: it owns the hook that fires when a microbatch's gradient of a parameter is complete.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence

import torch
from torch import nn

from nanotrain_core.errors import NanotrainError
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import Piece, PlacedParameter
from nanotrain_core.pipeline.passes import Passes


def watch(parameter: nn.Parameter, gradients: LocalGradients) -> None:
    """Have ``gradients`` told of each microbatch's gradient of ``parameter``.

    The hook does not keep ``gradients`` alive: a tensor's hooks are out of the garbage collector's
    sight, so a run, with its process groups, would stay in memory for good.
    """
    told = weakref.ref(gradients)

    def tell(accumulated: torch.Tensor) -> None:
        alive = told()
        if alive is not None:
            alive.accumulated(accumulated)

    parameter.register_post_accumulate_grad_hook(tell)  # type: ignore[no-untyped-call]


class LocalGradients:
    """Accumulates gradients over uses and microbatches, in the run's ``dtype`` if it has one.

    Left alone, autograd adds gradients in the parameter's dtype. Adding many in bfloat16 loses the small
    ones, so it is told another one: it then widens each gradient before it adds it, and a layer may
    return one that was never rounded to the parameter's dtype.
    """

    def __init__(self) -> None:
        self.placed: Sequence[PlacedParameter] = ()
        self._completing: set[nn.Parameter] = set()

    def attach(
        self,
        parameters: Sequence[PlacedParameter],
        mesh: Mesh,
        dtype: torch.dtype | None,
        passes: Passes | None = None,
    ) -> None:
        """Watch ``parameters``. See :class:`~nanotrain_core.contracts.GradientSync`."""
        self.placed = parameters
        self.dtype, self.passes = dtype, passes or Passes()
        self.check(mesh)
        for placed in parameters:
            if placed.parameter.requires_grad:
                placed.parameter.grad = None  # it may be of another dtype
                placed.parameter.grad_dtype = dtype or placed.parameter.dtype
                watch(placed.parameter, self)

    def check(self, mesh: Mesh) -> None:
        """Refuse a layout whose gradients are partial: nobody here would add them up."""
        for placed in self.placed:
            partial = placed.placement.sync_span(mesh.layout)
            if partial:
                raise NanotrainError(
                    f"the gradient of {placed.placement.name} is partial along {partial} and no "
                    'component provides gradient_sync (for example [[parallel]] use = "ddp")'
                )

    def accumulated(self, parameter: torch.Tensor) -> None:
        """Take a microbatch's gradient, and say so if it completes the sum."""
        assert isinstance(parameter, nn.Parameter)
        if parameter in self._completing:
            self.completed(parameter)

    def completed(self, parameter: nn.Parameter) -> None:
        """React to the last microbatch's gradient of ``parameter``; nothing to do without other ranks."""

    def last_microbatch(self, parameters: Collection[nn.Parameter]) -> None:
        """Start treating gradients of ``parameters`` as complete when they arrive."""
        self._completing.update(parameters)

    def microbatch(self, parameters: Collection[nn.Parameter]) -> None:
        """Go on adding up."""

    def complete(self, parameters: Collection[nn.Parameter]) -> None:
        """Nothing to do without other ranks."""

    def finish(self) -> None:
        """Nothing is in flight."""
        self._completing.clear()

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the complete gradient."""
        if parameter.grad is None:  # zeros_like would unpack a packed one first
            return torch.zeros(parameter.shape, dtype=self.dtype or parameter.dtype, device=parameter.device)
        return parameter.grad

    def pieces(self) -> Sequence[Piece]:
        """Return every parameter that is trained, whole."""
        return [Piece(p.parameter, p.placement) for p in self.placed if p.parameter.requires_grad]

    def gradient_of(self, piece: Piece) -> torch.Tensor:
        """Return the complete gradient of a whole parameter."""
        return self.gradient(piece.parameter)

    def drop(self, parameter: nn.Parameter) -> None:
        """Free the gradient this rank accumulated for ``parameter``."""
        parameter.grad = None

    def zero(self) -> None:
        """Forget all gradients, and a step that was broken off."""
        self._completing.clear()
        for placed in self.placed:
            self.drop(placed.parameter)
