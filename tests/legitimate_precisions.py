"""Precisions that are right and unusual: the harness must let them pass. See ``broken_twins.py``."""

import hashlib

import torch
from broken_histories import ScalesByTheStep
from broken_twins import twin
from torch import nn

from nanotrain_core import hookimpl
from nanotrain_core.component import Support
from nanotrain_core.contracts import MasterWeight
from nanotrain_core.layout.roles import Role, tagged
from nanotrain_core.precision.dtypes import cast, keep_dtype
from nanotrain_core.precision.loss_scale import NoLossScale
from nanotrain_core.precision.uniform import Float32Master, Uniform


class KeepsNormsWide(Uniform):
    """bfloat16, but for norms, which are float32 and compute in it."""

    def __init__(self, config):
        super().__init__(torch.bfloat16, NoLossScale())

    def convert(self, part: nn.Module) -> nn.Module:
        for _, module, found in list(tagged(part)):
            if found.role in (Role.NORM, Role.INNER):
                keep_dtype(module, *(name for name, _ in module.named_parameters(recurse=False)))
                module.register_forward_pre_hook(lambda _, args: (args[0].float(), *args[1:]))
                module.register_forward_hook(lambda _, args, y: y.bfloat16())
        return cast(part, torch.bfloat16)


class KeyedMaster(Float32Master):
    """Rounds a float32 master at random, by numbers that depend on the name and place of each element."""

    plain = None

    def __init__(self, weight, name):
        super().__init__(weight)
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        generator = torch.Generator().manual_seed(seed)
        self.noise = torch.randint(0, 1 << 16, weight.shape, dtype=torch.int32, generator=generator)

    def store(self, value):
        if value.data_ptr() != self.master.data_ptr():
            self.master.copy_(value)
        bits = self.master.float().contiguous().view(torch.int32)
        self.weight.copy_(((bits + self.noise) & ~0xFFFF).view(torch.float32))


class RoundsAtRandom(Uniform):
    """bfloat16 with stochastic rounding keyed by place."""

    def __init__(self, config):
        super().__init__(torch.bfloat16, NoLossScale())

    def master(self, weight, piece):
        return KeyedMaster(weight, piece.name) if weight.dtype is torch.bfloat16 else Float32Master(weight)


class Steps(NoLossScale):
    """Counts the steps of the run."""

    steps = 0

    def update(self, skipped):
        self.steps += 1

    def meta(self):
        return {"steps": self.steps}

    def load_meta(self, meta):
        self.steps = meta.get("steps", 0)


class SteppedMaster(MasterWeight):
    """A bfloat16 weight alone, rounded at random: by seed, step and name."""

    def __init__(self, weight, name, seed, clock):
        self.weight, self.name, self.seed, self.clock = weight, name, seed, clock

    def load(self):
        return self.weight.float()

    def store(self, value):
        key = hashlib.sha256(f"{self.seed} {self.clock.steps} {self.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:4], "little"))
        noise = torch.randint(0, 1 << 16, value.shape, dtype=torch.int32, generator=generator)
        bits = value.contiguous().view(torch.int32)
        self.weight.copy_(((bits + noise) & ~0xFFFF).view(torch.float32))


class RoundsByTheStep(Uniform):
    """bfloat16 without masters, with stochastic rounding keyed by the run's seed and step."""

    def __init__(self, config):
        super().__init__(torch.bfloat16, Steps())

    def setup(self, seed, passes, gemm):
        self.seed = seed

    def master(self, weight, piece):
        return SteppedMaster(weight, piece.name, self.seed, self.loss_scale)


@hookimpl
def nanotrain_register_precision(register):
    register(twin(KeepsNormsWide))
    register(twin(RoundsAtRandom))
    register(twin(RoundsByTheStep, supports={"rounds_to_nearest": Support.UNSUPPORTED}))
    register(twin(ScalesByTheStep))
