"""Precisions whose state follows passes that are no part of a step: see ``broken_twins.py``."""

import torch
from broken_twins import twin

from nanotrain_core import hookimpl
from nanotrain_core.layout.roles import tagged
from nanotrain_core.precision.gemm import TorchGEMM, gemm_parameters, use_gemm
from nanotrain_core.precision.loss_scale import NoLossScale
from nanotrain_core.precision.uniform import Uniform


class Largest(NoLossScale):
    """Keeps the largest input of each layer in the last step, by its name."""

    def __init__(self):
        self.last, self.now = {}, {}

    def update(self, skipped):
        self.last, self.now = self.now, {}

    def meta(self):
        return {"last": dict(self.last)}

    def load_meta(self, meta):
        self.last, self.now = dict(meta.get("last", {})), {}


class Delayed(TorchGEMM):
    """Rounds x to eight bits with the scale that the last step's inputs ask for."""

    def __init__(self, name, largest, passes):
        self.name, self.largest, self.passes = name, largest, passes

    def counts(self):
        return not self.passes.in_backward

    def rounded(self, x_MK):
        if self.counts():
            seen = max(self.largest.now.get(self.name, 0.0), x_MK.abs().max().item())
            self.largest.now[self.name] = seen
        scale = 448 / (self.largest.last.get(self.name) or 4.0)
        return (x_MK * scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x_MK.dtype) / scale

    def forward(self, x_MK, *weights_NK):
        x_MK = self.rounded(x_MK)
        return [x_MK @ weight_NK.T for weight_NK in weights_NK], (x_MK,)

    def save_for_wgrad(self, x_MK):
        return (self.rounded(x_MK),)

    def wgrad(self, d_y_MN, kept):
        return d_y_MN.T @ kept[0]


class ScalesByEveryPass(Uniform):
    """Counts the inputs of validation among those of the step."""

    backend = Delayed

    def __init__(self, config):
        super().__init__(torch.bfloat16, Largest())

    def setup(self, seed, passes, gemm):
        self.passes = passes

    def convert(self, part):
        part = super().convert(part)
        for name, module, _ in tagged(part):
            backend = self.backend(name, self.loss_scale, self.passes)
            use_gemm(module, dict.fromkeys(gemm_parameters(module), backend), self.passes)
        return part


class Counted(Delayed):
    def counts(self):
        return super().counts() and self.passes.counted


class ScalesByTheStep(ScalesByEveryPass):
    """Is right: it asks whether the pass is one of the step."""

    backend = Counted


class LastPass(Counted):
    """Forgets the step's maxima whenever a pass that is not counted comes between."""

    def counts(self):
        if not self.passes.counted:
            self.largest.last.pop(self.name, None)
        return super().counts()


class ForgetsInValidation(ScalesByEveryPass):
    """Begins its history anew after validation."""

    backend = LastPass


class Turns(Counted):
    """Rounds less and more by turns, one turn for each pass forward."""

    turn = 0

    def rounded(self, x_MK):
        if not self.passes.in_backward:
            self.turn += 1
        return super().rounded(x_MK * (1 + self.turn % 7 / 64))


class TakesTurns(ScalesByEveryPass):
    """Draws from a stream that each pass advances, whatever it is for."""

    backend = Turns


@hookimpl
def nanotrain_register_precision(register):
    for cls in (ScalesByEveryPass, ForgetsInValidation, TakesTurns):
        register(twin(cls))
