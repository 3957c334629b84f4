"""Checkpoints that take what does not fit, with one deliberate fault each: see ``broken_twins.py``."""

from unittest import mock

from broken_twins import twin

from nanotrain_core import hookimpl
from nanotrain_core.builtin import configs
from nanotrain_core.checkpoint import simple
from nanotrain_core.checkpoint.simple import SimpleCheckpoint, left_over, misfit


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


@hookimpl
def nanotrain_register_checkpoint(register):
    for cls in (
        RoundsOnLoading,
        RoundsMoments,
        RoundsWeights,
        DropsWhatIsLeft,
        DropsMomentsThatAreLeft,
        DropsWeightsThatAreLeft,
    ):
        register(twin(cls, configs.SimpleCheckpointConfig))
