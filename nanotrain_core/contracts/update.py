"""What a monitor may see of an update before it is made: every complete gradient, under its global name."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import torch

from nanotrain_core.contracts.optimizer import Block
from nanotrain_core.contracts.parallel import GradientSync
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import Piece
from nanotrain_core.optim.grad_norm import named_norms


@attrs.define(frozen=True, eq=False)
class PieceGradient:
    """The complete gradient of one piece: of a whole block of a parameter, or of a flat range of one."""

    piece: Piece
    """With its placement in the whole model."""
    tensor: torch.Tensor
    """In the shape of ``piece.weight``, without the loss scale. To be read only, and only during the event:
    it may be the memory that the optimizer is about to use."""

    @property
    def name(self) -> str:
        """The parameter's global name."""
        return self.piece.placement.name

    def blocks(self) -> Iterator[Block]:
        """Yield it as boxes of the whole tensor: one for a whole block, a few for a flat range."""
        return Block.of_piece("", self.tensor, self.piece)


@attrs.define(frozen=True, eq=False)
class UpdateReport:
    """The update that a step is about to make. Nothing is computed or sent before a method is called."""

    step: int
    """The first is 1."""
    loss_scale: float
    """What gradients are multiplied by in the run's memory; it is divided out of all that is offered here."""
    _sync: GradientSync
    _mesh: Mesh
    _names: list[str] = attrs.field(factory=list)
    """Of all trained parameters of the model, once they were asked for: shared by the reports of a run."""

    def gradients(self) -> Iterator[PieceGradient]:
        """Yield the gradient of every piece that this rank completes, before clipping.

        They are summed over microbatches and over all ranks with partial gradients: what one process would
        have of these elements. Together the ranks have every element of every trained parameter: those of
        replicas several times, those that ranks shard (``zero12``) once. A parameter that no backward
        pass reached has zeros. Not collective: a rank may look at some, or at none.
        """
        for piece in self._sync.pieces():
            found = self._sync.gradient_of(piece)
            yield PieceGradient(piece, found if self.loss_scale == 1.0 else found / self.loss_scale)

    def norms(self) -> dict[str, float]:
        """Return the 2-norm of every trained parameter's whole gradient, by global name, sorted.

        Collective: every rank must call it in the same step, and gets the same. It is one all-reduce of a
        number for each parameter, and waits for the device; the first call of a run gathers the names, too. A
        step that will be skipped has infinities or NaN.
        """
        if not self._names:
            own = {piece.placement.name for piece in self._sync.pieces()}
            self._names.extend(sorted(set().union(*self._mesh.gather(own))))
        pairs = ((each.tensor, each.piece.placement) for each in self.gradients())
        return dict(zip(self._names, named_norms(pairs, self._names, self._mesh), strict=True))
