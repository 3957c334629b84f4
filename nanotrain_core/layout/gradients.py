"""Accumulation and reduction of gradients between backward and the optimizer.

``LocalGradients`` accumulates on one rank. Data-parallel plugins build on it: it owns the hook that fires
when a microbatch's gradient of a parameter is complete. ``AllReduceGradients`` also all-reduces partial
gradients, and is used in every run in which no component provides ``gradient_sync``.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from nanotrain_core.errors import NanotrainError
from nanotrain_core.layout.dtensors import local_of
from nanotrain_core.layout.layout import Span
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import Piece, PlacedParameter
from nanotrain_core.pipeline.passes import Passes


def register_gradient_hook(parameter: nn.Parameter, gradients: LocalGradients) -> None:
    """Make autograd call ``gradients.on_gradient`` after each microbatch's gradient of ``parameter``.

    The hook holds no strong reference to ``gradients``: the garbage collector cannot see a tensor's hooks,
    so a run, with its process groups, would never be freed.
    """
    owner = weakref.ref(gradients)

    def hook(accumulated: torch.Tensor) -> None:
        alive = owner()
        if alive is not None:
            alive.on_gradient(accumulated)

    parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


class LocalGradients:
    """Accumulates gradients over uses and microbatches, in the run's ``dtype`` if it has one.

    By default autograd adds gradients in the parameter's dtype. Adding many in bfloat16 loses small
    ones, so autograd is given another dtype: it then upcasts each gradient before it adds it, and a layer may
    return one that was never rounded to the parameter's dtype.

    The order of calls in a step is that of :class:`~nanotrain_core.contracts.GradientSync`, with two more
    during backward: :meth:`on_gradient` for each parameter whenever a microbatch's gradient of it has
    been accumulated, and in a stage's last microbatch :meth:`on_final_gradient` right after it, in which
    a subclass starts to reduce.
    """

    needs_gradient_hooks = True
    """Whether autograd calls :meth:`on_gradient` for each parameter in each microbatch, at the cost of one
    Python call each. A class that does nothing before a stage's last microbatch is done sets it to False."""
    reads_dtensors = False
    """Whether gradients of DTensors are found in ``PlacedParameter.dtensor``."""
    reduces = False
    """Whether :meth:`finish` completes gradients that are partial. A class that does this sets it to True."""

    def __init__(self) -> None:
        self.placed: Sequence[PlacedParameter] = ()
        self._in_last_microbatch: set[nn.Parameter] = set()

    def attach(
        self,
        parameters: Sequence[PlacedParameter],
        mesh: Mesh,
        dtype: torch.dtype | None,
        passes: Passes | None = None,
    ) -> None:
        """Register ``parameters``. See :class:`~nanotrain_core.contracts.GradientSync`."""
        self.placed = parameters
        self.dtype, self.passes = dtype, passes or Passes()
        self.check(mesh)
        for placed in parameters:
            if placed.parameter.requires_grad:
                placed.parameter.grad = None  # it may be of another dtype
                placed.parameter.grad_dtype = dtype or placed.parameter.dtype
                if self.needs_gradient_hooks:
                    register_gradient_hook(placed.parameter, self)

    def check(self, mesh: Mesh) -> None:
        """Reject a layout with partial gradients, unless this class :attr:`reduces` them.

        Called by :meth:`attach`. A class that reduces gradients may override it, to prepare for the layout.
        """
        if self.reduces:
            return
        for placed in self.placed:
            partial = placed.placement.sync_span(mesh.layout)
            if partial:
                raise NanotrainError(
                    f"the gradient of {placed.placement.name} is partial along {partial}, and "
                    f"{type(self).__name__} does not reduce it; "
                    "expected another gradient_sync, such as nanotrain_core.api.torch.AllReduceGradients()"
                )

    def on_gradient(self, parameter: torch.Tensor) -> None:
        """Called after autograd has accumulated a microbatch's gradient into ``parameter.grad``."""
        assert isinstance(parameter, nn.Parameter)
        if parameter in self._in_last_microbatch:
            self.on_final_gradient(parameter)

    def on_final_gradient(self, parameter: nn.Parameter) -> None:
        """Called after the last microbatch's gradient was accumulated; a no-op without other ranks."""

    def last_microbatch(self, parameters: Collection[nn.Parameter]) -> None:
        """Treat gradients of ``parameters`` as complete from now on when they arrive."""
        self._in_last_microbatch.update(parameters)

    def microbatch_done(self, parameters: Collection[nn.Parameter]) -> None:
        """Do nothing: accumulation continues."""

    def backward_done(self, parameters: Collection[nn.Parameter]) -> None:
        """Do nothing: there are no other ranks."""

    def finish(self) -> None:
        """Do nothing: no reduction is in flight."""
        self._in_last_microbatch.clear()

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the complete gradient."""
        if parameter.grad is None:  # zeros_like would unpack a packed one first
            return torch.zeros(parameter.shape, dtype=self.dtype or parameter.dtype, device=parameter.device)
        return parameter.grad

    def pieces(self) -> Sequence[Piece]:
        """Return every trained parameter, whole."""
        return [Piece(p.parameter, p.placement) for p in self.placed if p.parameter.requires_grad]

    def gradient_of(self, piece: Piece) -> torch.Tensor:
        """Return the complete gradient of a whole parameter."""
        return self.gradient(piece.parameter)

    def drop(self, parameter: nn.Parameter) -> None:
        """Free the gradient that this rank accumulated for ``parameter``."""
        parameter.grad = None

    def zero(self) -> None:
        """Clear all gradients, including those of an interrupted step."""
        self._in_last_microbatch.clear()
        for placed in self.placed:
            self.drop(placed.parameter)


class AllReduceGradients(LocalGradients):
    """All-reduces each gradient over the ranks with a partial gradient, after backward, in the run's dtype.

    Gradients with the same ranks to sum over are joined into flat tensors, with one all-reduce for each.
    Nothing overlaps with backward: components that provide ``gradient_sync`` are faster.
    """

    needs_gradient_hooks = False
    reduces = True
    reads_dtensors = True

    #: Maximum bytes of gradients in one all-reduce, unless a single parameter has more: this much
    #: memory is needed in addition to the gradients.
    LIMIT = 32 * 2**20

    def attach(
        self,
        parameters: Sequence[PlacedParameter],
        mesh: Mesh,
        dtype: torch.dtype | None,
        passes: Passes | None = None,
    ) -> None:
        """Register ``parameters``, and fix which of them are all-reduced together, and in which order."""
        super().attach(parameters, mesh, dtype, passes)
        self._waits = mesh.waits
        self._sharded = [(each.parameter, each.dtensor) for each in parameters if each.dtensor is not None]
        self._sums = [(mesh.group_of(span), members) for span, members in self._joined(mesh)]

    def sums_after_backward(self, placed: PlacedParameter, span: Span) -> bool:
        """Return whether :meth:`finish` sums this gradient over ``span``. Called once, by :meth:`attach`.

        A subclass that reduces some gradients during backward returns False for these.
        """
        return True

    def _joined(self, mesh: Mesh) -> Iterator[tuple[Span, list[nn.Parameter]]]:
        """Yield the parameters of each all-reduce, in the same order on all ranks that take part.

        Those that several pipeline stages hold come last: their ranks have nothing else in common.
        """
        spans = [(p, p.placement.sync_span(mesh.layout)) for p in self.placed if p.parameter.requires_grad]
        partial = [each for each in spans if each[1] and self.sums_after_backward(*each)]
        partial.sort(key=lambda each: (each[1].stages, each[1].dims, each[0].placement.name))
        members: list[nn.Parameter] = []
        last, size = None, 0
        for placed, span in partial:
            dtype = self.dtype or placed.parameter.dtype
            own = placed.parameter.numel() * dtype.itemsize
            if members and ((span, dtype) != last or size + own > self.LIMIT):
                assert last is not None
                yield last[0], members
                members, size = [], 0
            members.append(placed.parameter)
            last, size = (span, dtype), size + own
        if last is not None:
            yield last[0], members

    def microbatch_done(self, parameters: Collection[nn.Parameter]) -> None:
        """Add a microbatch's gradients, which autograd left in DTensors, to this rank's."""
        for parameter, dtensor in self._sharded:
            if dtensor.grad is not None:
                own, before = local_of(dtensor.grad), parameter.grad
                dtensor.grad = None
                parameter.grad = own.to(self.dtype or own.dtype) if before is None else before.add_(own)

    def finish(self) -> None:
        """All-reduce all gradients."""
        super().finish()
        for group, parameters in self._sums:
            flat = torch.cat([self.gradient(parameter).reshape(-1) for parameter in parameters])
            with self._waits.collectives:
                dist.all_reduce(flat, group=group)
            totals = torch.split(flat, [parameter.numel() for parameter in parameters])
            for parameter, total in zip(parameters, totals, strict=True):
                parameter.grad = total.view(parameter.shape)

    def zero(self) -> None:
        """Clear all gradients, including those that an interrupted step left in DTensors."""
        super().zero()
        for _, dtensor in self._sharded:
            dtensor.grad = None
