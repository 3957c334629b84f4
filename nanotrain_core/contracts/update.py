"""The complete gradients that a monitor may inspect before an update, under their global names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import attrs
import torch

from nanotrain_core.contracts.optimizer import Block
from nanotrain_core.contracts.parallel import GradientSync
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import Piece, Placement
from nanotrain_core.metrics.gathered import read
from nanotrain_core.optim.grad_norm import named_norms
from nanotrain_core.precision.quantized_storage import dequantize


@attrs.define(frozen=True, eq=False)
class PieceGradient:
    """The complete gradient of one piece: a whole block of a parameter, or a flat range of one."""

    piece: Piece
    """The piece of a parameter, with its placement in the whole model."""
    tensor: torch.Tensor
    """In the shape of ``piece.weight``, without the loss scale. Read-only, and valid only during the event:
    it may be the memory that the optimizer is about to use."""

    @property
    def name(self) -> str:
        """The parameter's global name."""
        return self.piece.placement.name

    def blocks(self) -> Iterator[Block]:
        """Yield it as boxes of the global tensor: one for a whole block, a few for a flat range."""
        return Block.of_piece("", self.tensor, self.piece)


@attrs.define(frozen=True, eq=False)
class Computed:
    """A tensor that one pipeline stage received or computed in :meth:`UpdateReport.replay`."""

    stage: int
    """Number of the stage in the whole model, from 0."""
    what: str
    """``"input"``, ``"output"``, ``"loss lm"``, ``"gradient of the output"``, ``"gradient of the input"``, or
    ``"gradient of layers.0.attn.q.weight"``: this microbatch's part on this rank, not reduced."""
    tensor: torch.Tensor
    """The values, valid until the next tensor is requested."""
    received: bool = False
    """Whether the tensor comes from another stage, which computed it."""
    backward: bool = False
    """Whether the tensor is of the backward pass."""


@attrs.define(frozen=True, eq=False)
class UpdateReport:
    """The update that a step is about to make. Nothing is computed or sent before a method is called."""

    step: int
    """The step's number; the first is 1."""
    loss_scale: float
    """The factor of gradients in the run's memory; values that this class returns do not contain it."""
    logged: bool
    """Whether this step's metrics will be reported. Only in such steps compute anything beyond values that
    the host already has. (A step in which a stop is requested is reported too, but this is not known yet.)"""
    _sync: GradientSync
    _mesh: Mesh
    counts: Mapping[str, torch.Tensor] = attrs.field(factory=dict)
    """The count over which each term of the loss is a mean, for the whole batch: ``lm`` has the number of
    predicted tokens. Float64 on the run's device."""
    loads: dict[str, torch.Tensor] = attrs.field(factory=dict)
    """In ``on_after_update``: the tokens routed to each expert in the step [E], int64, over the whole batch,
    by name of each router on this rank. They cover the whole batch but only this rank's stages: ranks of
    other stages have other routers."""
    _kept: list[tuple[Piece, torch.Tensor]] = attrs.field(factory=list)
    tokens: int = 0
    """Tokens of the step's whole batch, predicted or not."""
    _changes: list[tuple[torch.Tensor, Placement]] = attrs.field(factory=list)
    """The cached result of :meth:`changes`, for several monitors that call it."""
    _names: list[str] = attrs.field(factory=list)
    """The names of all trained parameters of the model, once requested: shared by the reports of a run."""
    _replay: Callable[[int], Iterator[Computed]] = lambda replica: iter(())

    def count(self, term: str) -> float | torch.Tensor | None:
        """Return one of :attr:`counts`: a number if it is in host memory, else the tensor, not waiting for
        the device; None if the loss has no such term."""
        counted = self.counts.get(term)
        return read(counted) if counted is not None and counted.is_cpu else counted

    def gradients(self) -> Iterator[PieceGradient]:
        """Yield the gradient of every piece that this rank completes, before clipping.

        They are summed over microbatches and over all ranks with partial gradients: what one process would
        have for these elements. Together the ranks have every element of every trained parameter: those of
        replicas several times, those that ranks shard (``zero12``) once. A parameter that no backward
        pass reached has zeros. Not collective: a rank may read some, or none.
        """
        for piece in self._sync.pieces():
            found = self._sync.gradient_of(piece)
            yield PieceGradient(piece, found if self.loss_scale == 1.0 else found / self.loss_scale)

    def placed_gradients(self) -> Iterator[tuple[torch.Tensor, Placement]]:
        """Yield :meth:`gradients` in the form that ``run.metrics.placed`` takes."""
        yield from ((found.tensor, found.piece.placement) for found in self.gradients())

    def gradient_bytes(self) -> int:
        """Return the bytes that hold this rank's gradients, including buckets of the gradient sync."""
        held = [self._sync.gradient_of(piece) for piece in self._sync.pieces()]
        held += [p.grad for piece in self._sync.pieces() if (p := piece.parameter).grad is not None]
        return sum({s.data_ptr(): s.nbytes() for each in held for s in [each.untyped_storage()]}.values())

    def keep_weights(self, wanted: Callable[[Placement], bool] = lambda placement: True) -> None:
        """Copy the weights that this rank updates, for :meth:`changes`.

        The copies take as much memory as the selected weights.

        ``wanted`` selects the weights. The selections of several monitors are combined.
        """
        kept = {piece.name for piece, _ in self._kept}
        pieces = (p for p in self._sync.pieces() if p.name not in kept and wanted(p.placement))
        self._kept.extend((p, dequantize(p.weight).clone()) for p in pieces)

    def changes(self) -> Iterator[tuple[torch.Tensor, Placement]]:
        """Yield the change of each weight, in ``on_after_update`` of a step in which weights were kept.

        It is the change of the weights that the model computes with: for master weights of higher precision,
        their change after rounding. Nothing if weights were not kept; zeros if the step was skipped.
        """
        if self._kept:
            found = [
                (torch.sub(dequantize(piece.weight).detach(), before, out=before), piece.placement)
                for piece, before in self._kept
            ]  # in place of the copies: there is no third copy of the weights
            self._kept.clear()
            self._changes.extend(found)
        yield from self._changes

    def replay(self, replica: int) -> Iterator[Computed]:
        """Compute the step's first microbatch of data-parallel rank ``replica`` on all of them, and yield it.

        In ``on_before_update``. Forward and backward run with the weights of the step; gradients, routers'
        counts and RNG streams of the step are unchanged. Ranks that hold the same blocks of all parameters
        compute the same bits, if their hardware does. Collective: all ranks must exhaust it.

        Raises:
            NanotrainError: parameters are DTensors, whose gradients torch reduces in backward.
        """
        return self._replay(replica)

    def norms(self) -> dict[str, float]:
        """Return the 2-norm of every trained parameter's whole gradient, by global name, sorted.

        Collective: every rank must call it in the same step, and gets the same result. It costs one
        all-reduce of one value for each parameter, and a device synchronization; the first call of a run
        also gathers the names. The norms of a step that will be skipped include infinities or NaN.
        """
        if not self._names:
            own = {piece.placement.name for piece in self._sync.pieces()}
            self._names.extend(sorted(set().union(*self._mesh.gather(own))))
        pairs = ((each.tensor, each.piece.placement) for each in self.gradients())
        return dict(zip(self._names, named_norms(pairs, self._names, self._mesh), strict=True))
