"""The interfaces of parallel wrappers and of the gradient sync."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import Piece, PlacedParameter, Placements
from nanotrain_core.pipeline.passes import Passes


class Parallel:
    """A base class: transforms a model part while it is still on ``meta``."""

    def apply(self, part: nn.Module, placements: Placements, mesh: Mesh) -> nn.Module:
        """Return the transformed part (it may be the same object) and update ``placements`` to match.

        Parameters and buffers are on ``meta``. For each one that it shards, a wrapper assigns a parameter (or
        buffer) of the block's shape under the same name and replaces the entry of ``placements`` (see
        :meth:`Placement.split`, ``cut`` and ``sum_over``). The core rejects a part whose shapes and
        placements differ.

        The default returns ``part`` unchanged, for a component that only overrides :meth:`shard` or only
        provides gradient sync.

        Raises:
            NanotrainError: the part cannot be sharded over this mesh; the text names the dimension of the
                topology, or the key of the recipe, and the nearest valid value.
        """
        return part

    def op_wrappers(self, mesh: Mesh) -> Mapping[str, Callable[..., torch.Tensor]]:
        """Return wrappers for functions that models call, by field of ``Ops``: none by default.

        Each is called with the wrapped function, then with the model's arguments. It must return what one
        process would have computed for this rank's tokens and heads. With several wrappers, the last one is
        outermost.
        """
        return {}

    def shard(self, part: nn.Module, placements: Placements, mesh: Mesh) -> None:
        """Shard parameters of a finished part, still on ``meta``: no module is replaced after this.

        Those that the precision stores packed are
        :class:`~nanotrain_core.precision.quantized_storage.PackedWeight`.
        Parameters may become DTensors here, as with torch's ``fully_shard``, along dimensions of a
        DeviceMesh named as those of ``mesh``: the core records them in ``placements``. The gradient
        sync of the run must read their gradients from ``PlacedParameter.dtensor``.
        """

    def splits_linear(self, mesh: Mesh) -> bool:
        """Return whether linear layers must compute dgrad and wgrad apart, so that the wrapper schedules
        them.

        They then have a :class:`~nanotrain_core.precision.gemm.LinearGEMMs`.
        """
        return False


@runtime_checkable
class GradientSync(Protocol):
    """Owns every parameter's gradient between backward and the optimizer.

    Provided by the one component of a run that provides ``gradient_sync``; without one the core uses its own
    :class:`~nanotrain_core.layout.gradients.AllReduceGradients`, which reduces after backward.

    The calls of one step, for each pipeline stage: backward passes, each followed by :meth:`microbatch_done`;
    :meth:`last_microbatch` before the last of them, in which each gradient may be reduced as autograd
    accumulates it; :meth:`backward_done` after it. Then, for all stages: :meth:`finish`, :meth:`gradient_of`
    for each of :meth:`pieces`, and :meth:`zero`. The optimizer reads gradients, and monitors and the checks
    of the first step may have read them before: :meth:`gradient_of` may be called several times for a piece.
    """

    needs_gradient_hooks: bool = True
    """Whether Python code runs when autograd has accumulated a gradient, as to reduce it during backward: a
    step's last microbatch is then not replayed from a CUDA graph. May be set until :meth:`attach` returns."""
    reads_dtensors: bool = False
    """Whether it finds the gradients of DTensors, which autograd accumulates in ``PlacedParameter.dtensor``,
    as :class:`~nanotrain_core.layout.gradients.AllReduceGradients` does."""

    def attach(
        self,
        parameters: Sequence[PlacedParameter],
        mesh: Mesh,
        dtype: torch.dtype | None,
        passes: Passes,
    ) -> None:
        """Manage the gradients of ``parameters``. Accumulate in ``dtype`` (None: each parameter's own).

        ``passes.splits_backward`` is true if a weight's gradient may come later than the other gradients of
        its microbatch; ``passes.computing`` has the weights of the W pass in which it comes. Layers may
        return gradients in ``dtype``. Autograd rounds them to the parameter's dtype unless ``dtype`` is the
        parameter's ``grad_dtype``.
        """
        ...

    def last_microbatch(self, parameters: Collection[nn.Parameter]) -> None:
        """Announce that the next gradient of each of ``parameters`` is the last of this step.

        They are the parameters of one pipeline stage, in the same order on all ranks that hold the stage.
        """
        ...

    def microbatch_done(self, parameters: Collection[nn.Parameter]) -> None:
        """Announce that all gradients of ``parameters``, one pipeline stage's, exist for one more microbatch.

        Called for every microbatch, in the same order on all ranks that hold the stage.
        """
        ...

    def backward_done(self, parameters: Collection[nn.Parameter]) -> None:
        """Announce that this step has no more backward passes of ``parameters``.

        Parameters without a gradient by now get none.
        """
        ...

    def finish(self) -> None:
        """Return once every gradient is the complete sum over microbatches and ranks."""
        ...

    def pieces(self) -> Sequence[Piece]:
        """Return the pieces whose gradients this rank completes and updates: fixed after :meth:`attach`.

        Whole parameters, or a range of each where the ranks that sum the gradient of a block shard it (ZeRO).
        Ranks that hold the same block without summing it (the placement's ``same``) must shard it at the same
        elements, whatever else they hold: a checkpoint writes each distinct box once.
        """
        ...

    def gradient_of(self, piece: Piece) -> torch.Tensor:
        """Return a gradient in the shape of ``piece.weight``; zeros if no rank's backward reached it.

        It is still multiplied by the loss scale. The optimizer may scale it in place.
        """
        ...

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the gradient of a whole parameter, for a script's own optimizer.

        Raises:
            NanotrainError: this rank does not receive all of it.
        """
        ...

    def zero(self) -> None:
        """Clear all gradients."""
        ...


@runtime_checkable
class GathersWeights(Protocol):
    """Optional interface of a gradient sync that shards optimizer state: its pieces are ranges (ZeRO).

    With it any optimizer can update them: the core calls it, and the optimizer is unaware of other ranks. A
    gradient sync that is also the run's optimizer does not implement it.
    """

    def gather_weights(self) -> None:
        """Begin to all-gather this rank's updated ranges to all ranks that hold them. Collective.

        Called after the optimizer's setup and after each step that was not skipped.
        """
        ...

    def wait(self, parameters: Collection[nn.Parameter]) -> None:
        """Return when ``parameters`` are gathered: called right before the modules that read them."""
        ...


@runtime_checkable
class KnowsPieces(Protocol):
    """Optional interface of a gradient sync whose pieces are ranges: it knows which ones other ranks have.

    ``nanotrain plan`` composes few ranks of a run, where nobody can be asked. An optimizer that exchanges
    pieces, such as ``muon``, then takes ranks to have what this says.
    """

    def pieces_of(self, rank: int) -> Sequence[Piece]:
        """Return what :meth:`GradientSync.pieces` returns on ``rank``, of this pipeline stage.

        If ``rank`` has other blocks than this rank: what it would return if they were these.
        """
        ...
