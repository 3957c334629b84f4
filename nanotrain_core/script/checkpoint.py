"""A script's checkpoint: the built-in one with optimizer state, buffers, and the loader's position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
from torch import nn

from nanotrain_core.builtin.configs import SimpleCheckpointConfig
from nanotrain_core.checkpoint.simple import SimpleCheckpoint
from nanotrain_core.checkpoint.simple_listing import list_checkpoints
from nanotrain_core.contracts import Block, TrainState
from nanotrain_core.errors import CheckpointError
from nanotrain_core.script.feed import LoaderFeed
from nanotrain_core.script.optimizer import ScriptOptimizer

#: Prefix of the names of the loader's random-number streams, among those of the rank.
LOADER = "loader/"


class ScriptCheckpoint(SimpleCheckpoint):
    """The ``simple`` format with a script's model and optimizer. Rank 0's buffers are saved."""

    def __init__(
        self, config: SimpleCheckpointConfig, model: nn.Module, optimizer: ScriptOptimizer, feed: LoaderFeed
    ) -> None:
        super().__init__(config)
        refuse_extra_state(model)
        self.model, self.optimizer, self.feed = model, optimizer, feed

    def save(self, step: int, state: TrainState) -> None:
        """Save, with the model's buffers and the streams at the beginning of the pass over the loader.

        Raises:
            NanotrainError: the model has other parameters than when the engine was made.
        """
        self.optimizer.refuse_changes(self.model)
        refuse_extra_state(self.model)  # which may have appeared with the first batch
        streams = {LOADER + name: stream for name, stream in self.feed.begun.items()}
        super().save(
            step,
            attrs.evolve(
                state,
                blocks=[*state.blocks, *buffers(self.model)],
                rank_tensors={**state.rank_tensors, **streams},
            ),
        )

    def fitted(self, state: TrainState, meta: Mapping[str, Any]) -> TrainState:
        """Make the optimizer allocate the saved state, replacing its current state."""
        weights = [block for block in state.blocks if block.name in self.optimizer.names.values()]
        expected = self.optimizer.expect(meta.get("optimizer", {}))
        return attrs.evolve(state, blocks=[*weights, *expected, *buffers(self.model)])

    def load(self, which: str, state: TrainState) -> TrainState | None:
        """Load, and restore how the pass over the loader began in the feed; not after a change of layout."""
        saved = super().load(which, state)
        if saved is not None:
            self.feed.restored = streams = saved.rank_tensors
            self.feed.begun = {n.removeprefix(LOADER): streams[n] for n in streams if n.startswith(LOADER)}
        return saved


def refuse_extra_state(model: nn.Module) -> None:
    """Refuse a module's state that is neither a parameter nor a buffer: only these are saved.

    Raises:
        CheckpointError: with its name.
    """
    for key, value in model.state_dict().items():
        empty = value is None or 0 in getattr(value, "shape", ()) or (isinstance(value, dict) and not value)
        if key.rpartition(".")[2] == "_extra_state" and not empty:
            raise CheckpointError(
                f"the model has state that a script's checkpoint would lose, {key} of get_extra_state(): "
                "keep it in buffers, or train without a folder"
            )


def buffers(model: nn.Module) -> Iterator[Block]:
    """Yield the buffers that are part of the model's state, such as batch-norm statistics."""
    kept = model.state_dict().keys()
    for name, tensor in model.named_buffers():
        if name in kept:
            yield Block(f"buffer/{name}", tuple(tensor.shape), (0,) * tensor.dim(), tensor)


def claim(folder: Path, resume: str | None) -> None:
    """Create a script's folder.

    Raises:
        CheckpointError: it cannot be created, or it has checkpoints that the script does not resume from.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        saved = list_checkpoints(folder)
    except OSError as problem:
        raise CheckpointError(f"the folder {folder} cannot be used: {problem}") from None
    if saved and resume is None:
        steps = ", ".join(str(each.step) for each in saved)
        raise CheckpointError(
            f'{folder} has checkpoints of a run (steps {steps}): resume="auto" goes on from the last one, '
            "another folder begins anew"
        )
