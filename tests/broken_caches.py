"""Precisions that keep rounded weights too long, with one deliberate fault each: see ``broken_twins.py``."""

import torch
from broken_twins import twin

from nanotrain_core import hookimpl
from nanotrain_core.layout.roles import tagged
from nanotrain_core.precision.gemm import TorchGEMM, gemm_parameters, use_gemm
from nanotrain_core.precision.loss_scale import NoLossScale
from nanotrain_core.precision.uniform import Float32Master, Uniform


class Scale(NoLossScale):
    """Drops what backends keep when a step ends."""

    def __init__(self):
        self.ended = []

    def update(self, skipped):
        for kept in self.ended:
            kept.clear()


class Keeps(TorchGEMM):
    """Rounds weights to eight bits, and keeps them until ``kept`` is emptied."""

    def __init__(self):
        self.kept = {}

    def of(self, weight_NK):
        if id(weight_NK) not in self.kept:
            small = (weight_NK.detach() * 64).clamp(-448, 448).to(torch.float8_e4m3fn)
            self.kept[id(weight_NK)] = small.to(weight_NK.dtype) / 64
        return self.kept[id(weight_NK)]

    def forward(self, x_MK, *weights_NK):
        return [x_MK @ self.of(weight_NK).T for weight_NK in weights_NK], (x_MK,)

    def save_for_wgrad(self, x_MK):
        return (x_MK,)

    def dgrad(self, d_y_MN, weight_NK):
        return d_y_MN @ self.of(weight_NK)

    def wgrad(self, d_y_MN, kept):
        return d_y_MN.T @ kept[0]


class DropsThemAfterSteps(Uniform):
    """Drops them when a step ends, and keeps those of validation when a checkpoint is read."""

    backend = Keeps

    def __init__(self, config):
        super().__init__(torch.bfloat16, Scale())
        self.kept = []

    def setup(self, seed, passes, gemm):
        self.passes = passes

    def convert(self, part):
        part = super().convert(part)
        for _, module, _ in tagged(part):
            backend = self.backend()
            self.kept.append(backend.kept)
            use_gemm(module, dict.fromkeys(gemm_parameters(module), backend), self.passes)
        self.loss_scale.ended = self.kept
        return part


class DropsOnceUsed(Keeps):
    def wgrad(self, d_y_MN, kept):
        self.kept.clear()
        return super().wgrad(d_y_MN, kept)


class DropsThemInBackward(DropsThemAfterSteps):
    """Drops them in each backward pass and when a step ends."""

    backend = DropsOnceUsed


class TellingMaster(Float32Master):
    """Has all that is kept dropped when it stores."""

    plain = None

    def __init__(self, weight, kept):
        super().__init__(weight)
        self.kept = kept

    def store(self, value):
        for each in self.kept:
            each.clear()
        super().store(value)


class DropsThemWhenStored(DropsThemAfterSteps):
    """Drops them when an optimizer stores a weight, which no checkpoint does that is read."""

    def convert(self, part):
        part = super().convert(part)
        self.loss_scale.ended = []
        return part

    def master(self, weight, piece):
        return TellingMaster(weight, self.kept)


@hookimpl
def nanotrain_register_precision(register):
    for cls in (DropsThemAfterSteps, DropsThemInBackward, DropsThemWhenStored):
        register(twin(cls))
