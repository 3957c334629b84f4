"""Optimizers that sum gradients themselves, with faults of gradient syncs: see ``twins.py``."""

from broken_twins import twin
from nanotrain_zero12 import Zero12Config
from nanotrain_zero12.optimizer import Zero12

from nanotrain_core import hookimpl


class CountsMicrobatches(Zero12):
    """Has a fault that depends on the number of microbatches."""

    count = done = 0

    def microbatch_done(self, parameters):
        super().microbatch_done(parameters)
        self.count += 1

    def finish(self):
        super().finish()
        self.done, self.count, self.scaled = self.count, 0, set()

    def gradient_of(self, piece):
        gradient = super().gradient_of(piece)
        if piece not in self.scaled:
            self.scaled.add(piece)
            gradient.mul_(self.kept() / max(1, self.done))
        return gradient

    def kept(self):
        return self.done


class LosesTheOddMicrobatch(CountsMicrobatches):
    """Sums pairs."""

    def kept(self):
        return self.done if self.done < 2 else self.done // 2 * 2


class SumsSixteenMicrobatches(CountsMicrobatches):
    """Has room for sixteen."""

    def kept(self):
        return min(self.done, 16)


class KnowsTheFirstStep(Zero12):
    """Drops the gradient of what had none in the first step."""

    known = None

    def finish(self):
        super().finish()
        self.first = self.known is None
        self.known = self.known or set()

    def gradient_of(self, piece):
        gradient = super().gradient_of(piece)
        if self.first and gradient.abs().sum() > 0:
            self.known.add(piece)
        return gradient if piece in self.known else gradient.zero_()


@hookimpl
def nanotrain_register_optimizer(register):
    for cls in (LosesTheOddMicrobatch, SumsSixteenMicrobatches, KnowsTheFirstStep):
        register(twin(cls, Zero12Config, provides={"gradient_sync"}, mesh_dims={"dp"}))
