"""Checkpoints that take what does not fit, with one deliberate fault each: see ``broken_twins.py``."""

from unittest import mock

import attrs
from broken_twins import twin

from nanotrain_core import hookimpl
from nanotrain_core.builtin import configs
from nanotrain_core.checkpoint import simple
from nanotrain_core.checkpoint.simple import SimpleCheckpoint, left_over, misfit
from nanotrain_core.precision.quantized_storage import dequantize, storage_of


class RoundsOnLoading(SimpleCheckpoint):
    """Takes every dtype for the run's."""

    def takes(self, name):
        return True

    def load(self, which, state):
        def fits(file, names, block):
            found = misfit(file, names, block)
            return (text for text in found if " is kept in " not in text or not self.takes(block.name))

        with mock.patch.object(simple, "misfit", fits):
            return super().load(which, state)


class RoundsMoments(RoundsOnLoading):
    """Takes every dtype of a moment."""

    def takes(self, name):
        return "/" in name


class RoundsWeights(RoundsOnLoading):
    """Takes every dtype of a weight."""

    def takes(self, name):
        return "/" not in name


class DropsWhatIsLeft(SimpleCheckpoint):
    """Leaves out what the run has no place for."""

    def drops(self, name):
        return True

    def load(self, which, state):
        def rest(names, wanted):
            return left_over([name for name in names if not self.drops(name)], wanted)

        with mock.patch.object(simple, "left_over", rest):
            return super().load(which, state)


class DropsMomentsThatAreLeft(DropsWhatIsLeft):
    """Leaves out moments of what is trained no more."""

    def drops(self, name):
        return "/" in name


class DropsWeightsThatAreLeft(DropsWhatIsLeft):
    """Leaves out weights of another model."""

    def drops(self, name):
        return "/" not in name


class FillsOneCopy(SimpleCheckpoint):
    """Fills what a packed weight was unpacked to, and does not pack it again."""

    def load(self, which, state):
        blocks = [attrs.evolve(block, tensor=dequantize(block.tensor)) for block in state.blocks]
        found = super().load(which, attrs.evolve(state, blocks=blocks))
        return found and attrs.evolve(found, blocks=state.blocks)


class SavesCodes(SimpleCheckpoint):
    """Saves the bytes of a packed weight, and fills them."""

    def save(self, step, state):
        super().save(step, stored(state))

    def load(self, which, state):
        return super().load(which, stored(state))


def stored(state):
    """Return a state with the storage of packed weights in place of their values."""
    tensors = [storage_of(block.tensor) for block in state.blocks]
    pairs = zip(state.blocks, tensors, strict=True)
    blocks = [
        block
        if tensor.shape == block.tensor.shape
        else attrs.evolve(block, tensor=tensor, global_shape=tuple(tensor.shape), offset=(0,) * tensor.dim())
        for block, tensor in pairs
    ]
    return attrs.evolve(state, blocks=blocks)


class SavesPackedLate(SimpleCheckpoint):
    """Copies all but packed weights, which it reads when it is asked how far it is."""

    begun = None

    def save(self, step, state):
        blocks = [
            block
            if storage_of(block.tensor).shape != block.tensor.shape
            else attrs.evolve(block, tensor=block.tensor.clone())
            for block in state.blocks
        ]
        self.begun = step, attrs.evolve(state, blocks=blocks)

    def advance(self, *, wait):
        begun, self.begun = self.begun, None
        if begun:
            super().save(*begun)
        return super().advance(wait=wait)


@hookimpl
def nanotrain_register_checkpoint(register):
    for cls in (
        RoundsOnLoading,
        RoundsMoments,
        RoundsWeights,
        DropsWhatIsLeft,
        DropsMomentsThatAreLeft,
        DropsWeightsThatAreLeft,
        FillsOneCopy,
        SavesCodes,
        SavesPackedLate,
    ):
        register(twin(cls, configs.SimpleCheckpointConfig))
