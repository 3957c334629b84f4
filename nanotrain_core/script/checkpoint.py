"""A script's checkpoint: the built-in one with optimizer state, all state of the model, and the loader's
position.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn
from torch.serialization import default_restore_location

from nanotrain_core.builtin.configs import SimpleCheckpointConfig
from nanotrain_core.checkpoint.simple import SimpleCheckpoint
from nanotrain_core.checkpoint.simple_listing import list_checkpoints
from nanotrain_core.contracts import Block, TrainState
from nanotrain_core.errors import CheckpointError
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.monitors.replicas import hash_bits
from nanotrain_core.script.feed import LoaderFeed
from nanotrain_core.script.optimizer import ScriptOptimizer, block

#: Prefix of the names of the loader's random-number streams, among those of the rank.
LOADER = "loader/"
#: Kind of the tensors that hold state of ``get_extra_state()``, and the key of their sizes.
EXTRA = "extra_state"


class ScriptCheckpoint(SimpleCheckpoint):
    """The ``simple`` format with a script's model and optimizer. Rank 0's extra state counts, and on another
    number of ranks its buffers."""

    def __init__(
        self,
        config: SimpleCheckpointConfig,
        model: nn.Module,
        optimizer: ScriptOptimizer,
        feed: LoaderFeed,
        resume: str | None = None,
    ) -> None:
        super().__init__(config)
        extra_state(model)  # refuses at once what a save would refuse
        self.model, self.optimizer, self.feed = model, optimizer, feed
        self._claim: Callable[[Path], None] | None = partial(claim, resume=resume)
        self._extra: Mapping[str, torch.Tensor] = {}
        """Bytes of :func:`extra_state` that are being read."""

    def open(self, folder: Path, mesh: Mesh) -> None:
        """Use ``folder``, the first time only without checkpoints that another run has left since."""
        if self._claim is not None:
            self._claim(folder.parent)
            self._claim = None
        super().open(folder, mesh)

    def save(self, step: int, state: TrainState) -> None:
        """Save, with the model's buffers and the streams at the beginning of the pass over the loader.

        Raises:
            NanotrainError: the model has other parameters than when the engine was made.
        """
        self.optimizer.refuse_changes(self.model)
        extra = extra_state(self.model)  # on all ranks: what cannot be saved is refused by all
        extra = extra if self.mesh.rank == 0 else {}  # its size may differ between ranks
        streams = {LOADER + name: stream for name, stream in self.feed.begun.items()}
        streams |= own_buffers(self.model, self.mesh)
        with self.optimizer.for_evaluation():
            weights = [each for each in state.blocks if each.name in self.optimizer.names.values()]
            more = [*buffers(self.model), *(block(EXTRA, *each) for each in extra.items())]
            sizes = {key: kept.numel() for key, kept in extra.items()}
            super().save(
                step,
                attrs.evolve(
                    state,
                    blocks=[*weights, *self.optimizer.blocks(), *more],
                    meta={**state.meta, "optimizer": self.optimizer.meta(), EXTRA: sizes},
                    rank_tensors={**state.rank_tensors, **streams},
                ),
            )

    def fitted(self, state: TrainState, meta: Mapping[str, Any]) -> TrainState:
        """Make the optimizer allocate the saved state, replacing its current state."""
        weights = [each for each in state.blocks if each.name in self.optimizer.names.values()]
        expected = self.optimizer.expect(meta.get("optimizer", {}))
        sizes, known = meta.get(EXTRA, {}), keepers(self.model)
        self._extra = {key: torch.empty(sizes[key], dtype=torch.uint8) for key in sizes if key in known}
        extra = [block(EXTRA, *each) for each in self._extra.items()]
        return attrs.evolve(state, blocks=[*weights, *expected, *buffers(self.model), *extra])

    def load(self, which: str, state: TrainState) -> TrainState | None:
        """Load, and restore how the pass over the loader began in the feed; not after a change of layout.

        A rank gets its own buffers, which forward passes may read; on another number of ranks, rank 0's.
        On every rank modules get the state that those of rank 0 returned from ``get_extra_state()``.
        """
        saved = super().load(which, state)
        if saved is not None:
            self.feed.restored = streams = saved.rank_tensors
            self.feed.begun = {n.removeprefix(LOADER): streams[n] for n in streams if n.startswith(LOADER)}
            for each in buffers(self.model):
                if each.name in streams:
                    each.tensor.copy_(streams[each.name])
            kept, self._extra = self._extra, {}
            for key, module in keepers(self.model).items():
                if key in kept:
                    module.set_extra_state(read_extra_state(kept[key], self.mesh.device))
        return saved


def keepers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that have state of ``get_extra_state()``, by its key in ``state_dict()``."""
    return {
        f"{name}._extra_state".lstrip("."): module
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def extra_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return what modules return from ``get_extra_state()``, by key, as bytes.

    Raises:
        CheckpointError: it could not be read again.
    """
    found = {}
    for key, module in keepers(model).items():
        if type(module).set_extra_state is nn.Module.set_extra_state:
            raise CheckpointError(f"{key} cannot be restored: its module does not define set_extra_state()")
        file = BytesIO()
        try:
            torch.save(module.get_extra_state(), file)
            file.seek(0)
            torch.load(file, weights_only=True)
        except (pickle.PickleError, AttributeError, RuntimeError, TypeError) as problem:
            raise CheckpointError(
                f"{key}, of get_extra_state(), cannot be saved: expected tensors, numbers, texts, and lists "
                f"and dicts of them: {next(iter(str(problem).splitlines()), '')}"
            ) from None
        found[key] = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    return found


def read_extra_state(kept: torch.Tensor, device: torch.device) -> Any:
    """Return what :func:`extra_state` saved, with tensors on ``device`` that were not on the host."""
    restore: Callable[[Any, str], Any] = default_restore_location
    place = lambda storage, was: restore(storage, was if was == "cpu" else str(device))  # noqa: E731
    return torch.load(BytesIO(kept.numpy().tobytes()), map_location=place, weights_only=True)


def buffers(model: nn.Module) -> Iterator[Block]:
    """Yield the buffers that are part of the model's state, such as batch-norm statistics."""
    kept = model.state_dict().keys()
    for name, tensor in model.named_buffers():
        if name in kept:
            yield block("buffer", name, tensor)


def own_buffers(model: nn.Module, mesh: Mesh) -> dict[str, torch.Tensor]:
    """Return this rank's buffers that differ from rank 0's, in host memory. Collective.

    Such as batch norm's statistics of its batches. Those that are alike, as a mean of weights, may be large.
    One of another shape than rank 0's is not its own: a checkpoint has one tensor of that name.
    """
    if mesh.world_size == 1:
        return {}
    found = {each.name: each.tensor.detach() for each in buffers(model)}
    bits = {name: (t.shape, t.dtype, int(hash_bits(t))) for name, t in found.items()}  # where they are
    of_rank_0 = mesh.gather(bits)[0]

    def is_own(name: str) -> bool:
        known = of_rank_0.get(name)
        return known is None or (known != bits[name] and known[:2] == bits[name][:2])

    return {name: t.cpu() for name, t in found.items() if is_own(name)}


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
