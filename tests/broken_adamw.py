"""Kernels whose step of AdamW has one deliberate fault each, and one that is right."""

import torch
from broken_twins import twin

from nanotrain_core import hookimpl
from nanotrain_core.contracts import Kernels
from nanotrain_core.optim import moments
from nanotrain_core.optim.moments import FIRST, SECOND


class Steps(Kernels):
    """Takes all weights in float32, one after the other."""

    def __init__(self, config):
        self.config = config

    def low_precision_adamw(self, weights, states, group, found_inf):
        others = []
        for weight, state in zip(weights, states, strict=True):
            if weight.dtype == torch.float32:
                self.update(weight, state, group, found_inf)
            else:
                others.append(weight)
        return others

    def update(self, weight, state, group, found_inf):
        if found_inf is None or not found_inf:
            state["step"] += 1
            self.step(weight, weight.grad, state, state["step"].item(), group)

    def step(self, weight, gradient, state, count, group):
        beta1, beta2 = group["betas"]
        first = moments.load(state, FIRST, torch.float32).lerp(gradient, 1 - beta1)
        second = moments.load(state, SECOND, torch.float32) * beta2 + (1 - beta2) * gradient**2
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        root = second.sqrt() / (1 - beta2**count) ** 0.5 + group["eps"]
        weight.sub_(group["lr"] / (1 - beta1**count) * first / root)
        self.store(state, FIRST, first)
        self.store(state, SECOND, second)

    def store(self, state, name, moment):
        moments.store(state, name, moment)


class AddsDecayToGradients(Steps):
    """L2 regularization, which is not AdamW's."""

    def step(self, weight, gradient, state, count, group):
        decayed = gradient + group["weight_decay"] * weight
        super().step(weight, decayed, state, count, {**group, "weight_decay": 0.0})


class StepsAnyway(Steps):
    """Also where ``found_inf`` is 1: with gradients that are not finite."""

    def update(self, weight, state, group, found_inf):
        super().update(weight, state, group, None)


class ReturnsWhatItUpdated(Steps):
    """So plain PyTorch takes the step once more."""

    def low_precision_adamw(self, weights, states, group, found_inf):
        super().low_precision_adamw(weights, states, group, found_inf)
        return list(weights)


class CachesItsRate(Steps):
    """Of a group, from its first step on."""

    def step(self, weight, gradient, state, count, group):
        self.rate = getattr(self, "rate", group["lr"])
        super().step(weight, gradient, state, count, {**group, "lr": self.rate})


class RoundsScalesDown(Steps):
    """Of codes, so that the largest of a group is clipped."""

    def store(self, state, name, moment):
        super().store(state, name, moment)
        if (scale := state.get(f"{name}_scale")) is not None:
            scale.view(torch.int16).sub_((scale > 0).short())


class RoundsSecondMomentsToZero(Steps):
    """Of weights whose gradients are far below their group's largest: their next step is huge."""

    def store(self, state, name, moment):
        super().store(state, name, moment)
        if (code := state.get(f"{SECOND}_code")) is not None and name == SECOND:
            code[code == 1] = 0


class TruncatesToBfloat16(Steps):
    """Moments in bfloat16 are cut off, not rounded to nearest: they shrink."""

    def store(self, state, name, moment):
        cut = (moment.view(torch.int32) >> 16 << 16).view(torch.float32)
        super().store(state, name, cut if name in state and state[name].dtype == torch.bfloat16 else moment)


TWINS = (
    Steps,
    AddsDecayToGradients,
    StepsAnyway,
    ReturnsWhatItUpdated,
    CachesItsRate,
    RoundsScalesDown,
    RoundsSecondMomentsToZero,
    TruncatesToBfloat16,
)


@hookimpl
def nanotrain_register_kernels(register):
    for cls in TWINS:
        register(twin(cls))
