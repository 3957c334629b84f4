"""What a checkpoint format must offer, and a reader of weights alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs
import torch

from nanotrain_core.contracts.optimizer import Block
from nanotrain_core.contracts.reports import CheckpointReport
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import Shape
from nanotrain_core.run.plain_json import remembered


@attrs.define(frozen=True, eq=False)
class TrainState:
    """All that a run must remember: placed tensors, JSON, and each rank's own streams."""

    blocks: Sequence[Block]
    """Weights and optimizer state. Names are unique across the run; replicas are equal."""
    meta: Mapping[str, Any] = attrs.field(converter=remembered)
    """JSON, the same on every rank: step, scheduler, loss scale, data position, recipe."""
    rank_tensors: Mapping[str, torch.Tensor]
    """This rank's random-number streams, of several integer types, restored only on the same world size."""
    accept: Callable[[Mapping[str, Any]], None] = lambda meta: None
    """For a load: raises, on all ranks alike, if the run cannot go on from the saved ``meta``."""


class Checkpoint(Protocol):
    """Saves and restores a run in one folder. All but ``settle``, ``steps`` and ``verify`` are collective.

    A save has parts, so that files can be written while training goes on: :meth:`save` begins it,
    :meth:`settle` returns when ``state`` may change again, and :meth:`advance` tells, at a later step
    boundary, that it is complete and in place. One that writes at once tells in the first :meth:`advance`
    after it.
    """

    def open(self, folder: Path, mesh: Mesh) -> None:
        """Use ``folder``, made on the first save, and clear away what a killed save left there."""
        ...

    def due(self, step: int) -> bool:
        """Return whether to save after ``step`` steps are done, the same on every rank.

        The final save, and one when the run is asked to stop, are always made.
        """
        ...

    def save(self, step: int, state: TrainState) -> None:
        """Begin a checkpoint that will appear complete or not at all. None may be on its way.

        The blocks of ``state`` stay as they are until :meth:`settle` or ``advance(wait=True)`` has returned,
        its ``meta`` and streams only until this returns.

        Raises:
            CheckpointError: on every rank: nothing was begun, and a later save may succeed.
        """
        ...

    def settle(self) -> None:
        """Return once the state of the save on its way may change. Called before every update of weights.

        What fails here is raised by :meth:`advance`. One that has written or copied everything when
        :meth:`save` returns has nothing to do.
        """
        ...

    def advance(self, *, wait: bool) -> Sequence[CheckpointReport]:
        """Return what became complete since the last call. With ``wait`` that is all that was begun.

        Every rank calls it after the same steps. Ranks talk only while a save is on its way.

        Raises:
            CheckpointError: on every rank: the save failed on one, and nothing of it is left.
        """
        ...

    def load(self, which: str, state: TrainState) -> TrainState | None:
        """Fill ``state.blocks`` in place and return what was saved, or None if there is nothing.

        What is whole and fits is shown to ``state.accept`` before anything live is touched, or moved.
        Later steps in the run's own folder are of a branch that the run leaves, by a resume or a rollback,
        and so are all steps there if what is loaded is elsewhere: move them aside, so that :meth:`steps`
        does not name them and no later ``"latest"`` finds them.

        Args:
            state: what to fill. Blocks may be cut in any other way than they were saved.
            which: ``"latest"``: the newest that is whole and that all ranks can read, damaged newer ones
                being set aside with a warning; or a step number, or a path, and then exactly this one.

        Raises:
            CheckpointError: on every rank: it is damaged or does not fit, or of several none is whole.
                Nothing live was touched, and nothing moved.
        """
        ...

    def steps(self) -> Sequence[int]:
        """Return the steps with a complete checkpoint, oldest first."""
        ...

    def verify(self, step: int) -> Sequence[str]:
        """Return what is wrong with a checkpoint: empty if it would load."""
        ...


class WeightReader(Protocol):
    """The weights of one saved model, opened for reading a block at a time."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Of every parameter, by global name, and of nothing else: no optimizer state."""
        ...

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """As stored, by global name."""
        ...

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """Return one block, on the CPU. Every slice has both ends."""
        ...

    def damage(self) -> Sequence[str]:
        """Read everything if need be, and return what is wrong: empty if it is whole."""
        ...


@attrs.define(frozen=True, eq=False)
class SavedWeights:
    """What the callable of ``Component.weights`` returns for a path of its format."""

    model: Mapping[str, Any]
    """The table ``[model]`` they belong to, with ``use``."""
    reader: WeightReader
