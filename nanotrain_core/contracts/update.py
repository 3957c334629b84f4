"""What a monitor may see of an update before it is made: every complete gradient, under its global name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import attrs
import torch

from nanotrain_core.contracts.optimizer import Block
from nanotrain_core.contracts.parallel import GradientSync
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import Piece, Placement
from nanotrain_core.optim.grad_norm import named_norms
from nanotrain_core.precision.quantized_storage import dequantize


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
    logged: bool
    """Whether this step's metrics are reported next. What costs more than a number that the host has
    anyway is worth it in these steps alone. (One in which a stop is requested is reported, too: nobody knows
    yet.)"""
    _sync: GradientSync
    _mesh: Mesh
    counts: Mapping[str, torch.Tensor] = attrs.field(factory=dict)
    """What each term of the loss is a mean over, of the whole batch: ``lm`` has the tokens that are
    predicted. Float64 on the run's device."""
    loads: dict[str, torch.Tensor] = attrs.field(factory=dict)
    """In ``on_after_update``: the tokens that each expert got in the step [E], int64, over the whole batch,
    by name of each router on this rank. Those of the whole model: ranks of other stages have other
    routers."""
    _kept: list[tuple[Piece, torch.Tensor]] = attrs.field(factory=list)
    tokens: int = 0
    """Of the step's whole batch, predicted or not."""
    _changes: list[tuple[torch.Tensor, Placement]] = attrs.field(factory=list)
    """What :meth:`changes` has found, for several monitors that ask."""
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

    def placed_gradients(self) -> Iterator[tuple[torch.Tensor, Placement]]:
        """Yield :meth:`gradients` as ``run.metrics.placed`` takes them."""
        yield from ((found.tensor, found.piece.placement) for found in self.gradients())

    def gradient_bytes(self) -> int:
        """Return the bytes that hold this rank's gradients, buckets of the gradient sync included."""
        held = [self._sync.gradient_of(piece) for piece in self._sync.pieces()]
        held += [p.grad for piece in self._sync.pieces() if (p := piece.parameter).grad is not None]
        return sum({s.data_ptr(): s.nbytes() for each in held for s in [each.untyped_storage()]}.values())

    def keep_weights(self, wanted: Callable[[Placement], bool] = lambda placement: True) -> None:
        """Copy the weights that this rank updates, so that :meth:`changes` knows them: as much memory
        again.

        ``wanted`` says which. Those of several monitors add up.
        """
        kept = {piece.name for piece, _ in self._kept}
        pieces = (p for p in self._sync.pieces() if p.name not in kept and wanted(p.placement))
        self._kept.extend((p, dequantize(p.weight).clone()) for p in pieces)

    def changes(self) -> Iterator[tuple[torch.Tensor, Placement]]:
        """Yield by how much weights have changed, in ``on_after_update`` of a step in which they were kept.

        It is the change of the weights that the model computes with: of master weights with more bits, what
        rounding left of it. Nothing if they were not kept; zeros if the step was skipped.
        """
        if self._kept:
            found = [
                (torch.sub(dequantize(piece.weight).detach(), before, out=before), piece.placement)
                for piece, before in self._kept
            ]  # where the copies were: there is no third copy of the weights
            self._kept.clear()
            self._changes.extend(found)
        yield from self._changes

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
