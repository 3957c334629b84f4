"""Checkpoints with one deliberate fault each: see ``broken_twins.py``."""

import contextlib
from functools import partial
from unittest import mock

import attrs
import torch
from broken_twins import twin
from safetensors import safe_open

from nanotrain_core import hookimpl
from nanotrain_core.builtin import configs
from nanotrain_core.checkpoint import simple as simple_checkpoint
from nanotrain_core.checkpoint.simple import SimpleCheckpoint
from nanotrain_core.checkpoint.simple_listing import list_checkpoints
from nanotrain_core.errors import CheckpointError


def write_in_place(path, write):
    """Fill the file under its final name instead of moving a complete one there."""
    path.open("wb").close()
    write(path)


class WritesInPlace(SimpleCheckpoint):
    def _write(self, step, tensors, meta):
        with mock.patch.object(simple_checkpoint, "write_atomically", write_in_place):
            super()._write(step, tensors, meta)


class SavesInOneDtype(SimpleCheckpoint):
    """Writes all tensors in the dtype of the first, as one flat array would be."""

    def _write(self, step, tensors, meta):
        first = next(iter(tensors.values())).dtype
        super()._write(step, {name: each.to(first).to(each.dtype) for name, each in tensors.items()}, meta)


class NeverFallsBack(SimpleCheckpoint):
    """Insists on the newest checkpoint, whole or not."""

    def load(self, which, state):
        steps = self.steps()
        return super().load(str(steps[-1]) if which == "latest" and steps else which, state)


class TellsAnyhow(SimpleCheckpoint):
    """Has ranks take a save for complete whatever became of the one that writes, or of its disk."""

    saving = False

    def save(self, step, state):
        self.saving = self.mesh.world_size > 1
        super().save(step, state)
        self.saving = False

    def _agree(self, error):
        with contextlib.suppress(RuntimeError if self.saving else ()):
            super()._agree(None if self.saving else error)


class SetsAllAside(SimpleCheckpoint):
    """Moves damaged checkpoints away though no other is left: the next launch finds none, and begins anew."""

    def load(self, which, state):
        try:
            return super().load(which, state)
        except CheckpointError:
            if which == "latest":
                self._quarantine({self.path(step): "damaged" for step in self.steps()})
            raise


class KeepsTheOtherBranch(SimpleCheckpoint):
    """Leaves checkpoints of later steps where they are when an older one is loaded."""

    def load(self, which, state):
        with mock.patch.object(simple_checkpoint, "set_branch_aside"):
            return super().load(which, state)


class ReadsTooLate(SimpleCheckpoint):
    """Begins a save, and reads what is to be written when it is asked how far it is."""

    begun = None

    def save(self, step, state):
        self.begun = step, state

    def advance(self, *, wait):
        begun, self.begun = self.begun, None
        if begun:
            super().save(*begun)
        return super().advance(wait=wait)


class AsksTooLate(SimpleCheckpoint):
    """Fills live tensors, and asks then whether the run accepts what they were filled with."""

    def load(self, which, state):
        found = super().load(which, attrs.evolve(state, accept=lambda meta: None))
        if found is not None:
            state.accept(found.meta)
        return found


class KeepsFrozenOnes(SimpleCheckpoint):
    """Writes frozen tensors as it has written them before, whatever was loaded since."""

    frozen, kept = (), None

    def save(self, step, state):
        self.frozen = {block.name for block in state.blocks if block.frozen}
        super().save(step, state)

    def _write(self, step, tensors, meta):
        self.kept = self.kept or {name: tensors[name].clone() for name in self.frozen}
        super()._write(step, tensors | self.kept, meta)


class NamesTheFirst(KeepsFrozenOnes):
    """Has frozen tensors in its first checkpoint alone, where later ones find them."""

    def _write(self, step, tensors, meta):
        names = [*self.frozen] if self.steps() else []
        less = {name: torch.zeros_like(tensors[name]) for name in names}
        SimpleCheckpoint._write(self, step, tensors | less, {**meta, "frozen": names})

    def load(self, which, state):
        found, first = super().load(which, state), self.steps()[:1]
        names = found.meta.get("frozen") if found is not None else None
        if names and self.mesh.rank == 0:
            with safe_open(self.path(first[0]), framework="pt") as file:
                for block in state.blocks:
                    if block.name in names:
                        block.tensor.copy_(file.get_tensor(block.name))
        return found


class ListsBareHashes(SimpleCheckpoint):
    """Has a listing that gives a file's hash in place of what is known of the file."""


def bare_hashes(path):
    def describe(saved):
        said = saved.describe()
        return {**said, "files": {name: entry["sha256"] for name, entry in said["files"].items()}}

    return [attrs.evolve(saved, describe=partial(describe, saved)) for saved in list_checkpoints(path)]


@hookimpl
def nanotrain_register_checkpoint(register):
    register(twin(WritesInPlace, configs.SimpleCheckpointConfig))
    register(twin(SavesInOneDtype, configs.SimpleCheckpointConfig))
    register(twin(NeverFallsBack, configs.SimpleCheckpointConfig))
    register(twin(TellsAnyhow, configs.SimpleCheckpointConfig))
    register(twin(SetsAllAside, configs.SimpleCheckpointConfig))
    register(twin(KeepsTheOtherBranch, configs.SimpleCheckpointConfig))
    register(twin(ReadsTooLate, configs.SimpleCheckpointConfig))
    register(twin(AsksTooLate, configs.SimpleCheckpointConfig))
    register(twin(KeepsFrozenOnes, configs.SimpleCheckpointConfig))
    register(twin(NamesTheFirst, configs.SimpleCheckpointConfig))
    register(twin(ListsBareHashes, configs.SimpleCheckpointConfig, listing=f"{__name__}:bare_hashes"))
