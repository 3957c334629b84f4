"""The interface of a checkpoint format, and of a reader of weights alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs
import torch

from nanotrain_core.checkpoint.tensor_boxes import Shape
from nanotrain_core.contracts.optimizer import Block
from nanotrain_core.contracts.reports import CheckpointReport
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.run.plain_json import remembered


@attrs.define(frozen=True, eq=False)
class TrainState:
    """The complete state of a run: placed tensors, JSON metadata, and per-rank random-number streams."""

    blocks: Sequence[Block]
    """Weights and optimizer state. Names are unique across the run; replicas are equal."""
    meta: Mapping[str, Any] = attrs.field(converter=remembered)
    """JSON, the same on every rank: step, scheduler, loss scale, data position, recipe."""
    rank_tensors: Mapping[str, torch.Tensor]
    """This rank's random-number streams, of several integer types, restored only on the same world size."""
    accept: Callable[[Mapping[str, Any]], None] = lambda meta: None
    """For a load: raises, on all ranks alike, if the run cannot continue from the saved ``meta``. An error
    of the load after it is explained by what the saved recipe has otherwise."""


class Checkpoint(Protocol):
    """Saves and restores a run in one folder.

    ``open``, ``due``, ``save``, ``advance`` and ``load`` are collective: all ranks call them at the same
    point, and a format may communicate in each of them. ``settle``, ``steps`` and ``verify`` are not.

    A save has several stages, so that files can be written while training continues: :meth:`save` begins it,
    :meth:`settle` returns when ``state`` may change again, and :meth:`advance` reports, at a later step
    boundary, that it is complete and in place. A synchronous format reports it in the first :meth:`advance`
    after the save.
    """

    def open(self, folder: Path, mesh: Mesh) -> None:
        """Use ``folder``, which the first save creates, and remove what an interrupted save left there."""
        ...

    def due(self, step: int) -> bool:
        """Return whether to save after ``step`` steps are done, the same on every rank.

        The final save, and the save when the run is asked to stop, are always made.
        """
        ...

    def save(self, step: int, state: TrainState) -> None:
        """Begin a checkpoint that will appear complete or not at all. No other save may be in progress.

        Of a packed weight the values are saved, ``dequantize(block.tensor)``, in the weight's dtype. The
        blocks of ``state`` stay unchanged until :meth:`settle` or ``advance(wait=True)`` has returned,
        its ``meta`` and streams only until this method returns.

        Raises:
            CheckpointError: on every rank: nothing was begun, and a later save may succeed.
        """
        ...

    def settle(self) -> None:
        """Return once the state of the save in progress may change. Called before every weight update.

        A failure here is raised by :meth:`advance`. A format that has written or copied everything when
        :meth:`save` returns has nothing to do.
        """
        ...

    def advance(self, *, wait: bool) -> Sequence[CheckpointReport]:
        """Return the checkpoints completed since the last call; ``wait`` first completes any in progress.

        Every rank calls it after the same steps. Ranks communicate only while a save is in progress.

        Raises:
            CheckpointError: on every rank: the save failed on one rank, and nothing of it remains.
        """
        ...

    def load(self, which: str, state: TrainState) -> TrainState | None:
        """Fill ``state.blocks`` in place and return what was saved, or None if there is no checkpoint.

        A complete checkpoint is passed to ``state.accept`` before tensors that do not fit are an error, and
        before any live state or file is modified. Later steps in the run's own folder belong to a branch that
        a resume or rollback abandons, and so do all steps there if the checkpoint is loaded from elsewhere:
        move them aside, so that :meth:`steps` does not list them and no later ``"latest"`` finds them.

        Args:
            state: what to fill. Its blocks may be sharded differently from the saved ones.
            which: ``"latest"``: the newest checkpoint that is complete and readable by all ranks; damaged
                newer ones are set aside with a warning. Or a step number, or a path: exactly this one.

        Raises:
            CheckpointError: on every rank: it is damaged or does not fit, or none of several is complete. No
                live state was modified and no file was moved.
        """
        ...

    def steps(self) -> Sequence[int]:
        """Return the steps with a complete checkpoint, oldest first."""
        ...

    def verify(self, step: int) -> Sequence[str]:
        """Return what is wrong with a checkpoint: empty if it can be loaded."""
        ...


class WeightReader(Protocol):
    """The weights of one saved model, opened for reading one block at a time."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Return the shape of every parameter, by global name. Optimizer state is not included."""
        ...

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Return the stored dtypes, by global name."""
        ...

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """Return one block, on the CPU. Every slice has an explicit start and stop."""
        ...

    def damage(self) -> Sequence[str]:
        """Return what is wrong, reading all data if necessary: empty if it is intact."""
        ...


@attrs.define(frozen=True, eq=False)
class SavedWeights:
    """What the callable of ``Component.weights`` returns for a path of its format."""

    model: Mapping[str, Any]
    """The recipe's ``[model]`` table that they belong to, with ``use``."""
    reader: WeightReader
    step: int | None = None
    """Of the checkpoint."""
    recipe: str = ""
    """Of the run that saved them, as its checkpoints have it: its wrappers may have added parameters."""
    averages: WeightReader | None = None
    """Moving averages of weights, by the weights' names: the state ``ema/NAME`` of the optimizer."""
