"""The interface of an optimizer, and the blocks that its state is saved in."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import attrs
import torch
from torch import nn

from nanotrain_core.checkpoint.tensor_boxes import Shape, boxes_at
from nanotrain_core.contracts.kernels import Kernels
from nanotrain_core.contracts.parallel import GradientSync
from nanotrain_core.contracts.precision import Precision
from nanotrain_core.errors import PluginError
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import Piece, PlacedParameter, Placement


@attrs.define(frozen=True, eq=False)
class Block:
    """A live tensor that a checkpoint saves and fills, and its position in the global tensor.

    A weight that the precision stores packed is a
    :class:`~nanotrain_core.precision.quantized_storage.PackedWeight`.
    """

    name: str
    """The global name, the same on every layout; of optimizer state ``exp_avg/NAME``."""
    global_shape: Shape
    """Shape of the whole tensor."""
    offset: Shape
    """Where the block begins in it, one number for each axis."""
    tensor: torch.Tensor
    """The block, live: a load fills it in place."""
    frozen: bool = False
    """Whether no step changes its values: a format may share what it has written of them between
    checkpoints, until a load or somebody else writes to the tensor (``storage_of(tensor)._version``)."""

    def __attrs_post_init__(self) -> None:
        """Reject a block that is not part of the global tensor.

        Raises:
            PluginError: naming the block.
        """
        shape, offset, whole = self.tensor.shape, self.offset, self.global_shape
        if shape == whole and len(offset) == len(whole) and not any(offset):  # as most are
            return
        fits = len(shape) == len(offset) == len(whole)
        for begin, size, end in zip(offset, shape, whole, strict=False):
            fits = fits and 0 <= begin <= begin + size <= end
        if not fits:
            text = f"shape {tuple(shape)} at {tuple(offset)} is no part of {tuple(whole)}"
            raise PluginError(f"block {self.name} of a checkpoint: {text}")

    @classmethod
    def of(cls, prefix: str, tensor: torch.Tensor, placement: Placement) -> Block:
        """Name a tensor after its parameter, as in ``exp_avg/layers.0.attn.q.weight``.

        It has the shape of the parameter's block, or is a scalar shared by all blocks.
        """
        name = f"{prefix}/{placement.name}" if prefix else placement.name
        if not tensor.shape:
            return cls(name, (), (), tensor)
        return cls(name, placement.global_shape, placement.offset, tensor)

    @classmethod
    def of_piece(cls, prefix: str, tensor: torch.Tensor, piece: Piece) -> Iterator[Block]:
        """Yield the blocks of a tensor shaped as ``piece.weight``: a flat range consists of a few boxes."""
        placement = piece.placement
        if piece.span is None or not tensor.shape:
            yield cls.of(prefix, tensor, placement)
            return
        name, first = f"{prefix}/{placement.name}" if prefix else placement.name, 0
        for offset, shape in boxes_at(placement.offset, placement.shape, *piece.span):
            view = tensor[first : first + prod(shape)].view(shape)
            first += prod(shape)
            yield cls(name, placement.global_shape, offset, view)


@attrs.define(frozen=True, eq=False)
class StepStats:
    """The measurements of one optimizer step. Tensors stay on the device until they are read."""

    grad_norm: torch.Tensor
    """Global 2-norm before clipping: a scalar, bitwise equal on every rank, even one without a shard."""
    skipped: bool | torch.Tensor = False
    """A bool, or a scalar bool tensor on the device if the step was skipped there without a host
    synchronization. Evaluating its truth value synchronizes."""


class Optimizer:
    """A base class: updates weights from summed gradients. Its config is an ``OptimizerConfig``."""

    inner: torch.optim.Optimizer
    """Holds ``param_groups`` for learning-rate schedulers."""
    kernels: Kernels = Kernels()
    """The run's kernels, which the core sets before :meth:`setup`."""
    returns_early: bool = False
    """Whether :meth:`step` returns while updated weights are in flight: a reader of them calls
    :meth:`wait`."""

    def setup(
        self,
        parameters: Sequence[PlacedParameter],
        precision: Precision,
        gradients: GradientSync,
        mesh: Mesh,
    ) -> None:
        """Create the masters and allocate all state, so that a checkpoint can fill it before step 1.

        ``gradients`` is attached: its ``pieces()`` are what this rank updates.

        Raises:
            NanotrainError: the precision's masters need error feedback
                (:class:`~nanotrain_core.contracts.ErrorFeedback`) and this optimizer cannot carry it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no setup(parameters, precision, gradients, mesh)"
        )

    def step(self, *, loss_scale: float = 1.0) -> StepStats:
        """Divide gradients by ``loss_scale``, clip them to the config's global norm, update.

        ``StepStats.grad_norm`` is the norm after the division and before clipping. A step whose global norm
        is not finite changes nothing, on all ranks alike, and is reported as skipped. Where the mesh
        ``device_is_async``, an optimizer that can do so skips the step on the device without a host read.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step(loss_scale=...)")

    def wait(self, parameters: Collection[nn.Parameter]) -> None:
        """Return when the updated weights of ``parameters`` have arrived.

        If the optimizer ``returns_early``, the core calls it for a module's parameters right before it calls
        the module: see :mod:`nanotrain_core.layout.parameters_in_flight`.
        """

    def blocks(self) -> Iterable[Block]:
        """Yield a :class:`Block` of every state tensor, masters included, named ``state/parameter``.

        Use :meth:`Block.of_piece`. The names and global shapes of all ranks together must be the same on
        every layout, and must not change after :meth:`setup`. Tensors are live: a checkpoint fills them in
        place.
        """
        raise NotImplementedError(f"{type(self).__name__} has no blocks()")

    def blocks_of(self, parameters: Collection[str]) -> Iterable[Block]:
        """Yield the :meth:`blocks` of parameters of these names; faster if it makes no others."""
        return (block for block in self.blocks() if block.name.partition("/")[2] in parameters)

    def meta(self) -> dict[str, Any]:
        """Return the rest of the state as JSON."""
        return {}

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Restore what :meth:`meta` returned."""
