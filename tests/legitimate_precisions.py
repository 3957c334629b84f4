"""Precisions that are right and unusual: the harness must let them pass. See ``broken_twins.py``."""

import hashlib

import torch
from broken_histories import ScalesByTheStep
from broken_twins import twin
from torch import nn

from nanotrain_core import hookimpl
from nanotrain_core.component import Support
from nanotrain_core.contracts import MasterWeight
from nanotrain_core.layout.placement import RANGE
from nanotrain_core.layout.roles import Role, tagged
from nanotrain_core.precision.dequantizing_gemm import DequantizingGEMM
from nanotrain_core.precision.dtypes import cast, keep_dtype
from nanotrain_core.precision.gemm import TorchGEMM, gemm_parameters, use_gemm
from nanotrain_core.precision.loss_scale import NoLossScale
from nanotrain_core.precision.quantized_storage import PackedWeight, Packing, dequantize
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


class FourBits(Packing):
    """Integers from -7 to 7, times a power of two for each row: 18% from normal weights."""

    name = "four_bits"
    width = RANGE // 2 + 1

    def codes(self, numbers):
        rows = -(-len(numbers) // RANGE)
        rows = nn.functional.pad(numbers.float(), (0, rows * RANGE - len(numbers))).view(rows, RANGE)
        largest = rows.abs().amax(1, keepdim=True).clamp(min=2.0**-100)
        exponents = torch.ceil(torch.log2(largest / 7))
        return torch.round(rows * torch.exp2(-exponents)), exponents

    def rounded(self, numbers):
        codes, exponents = self.codes(numbers)
        return (codes * torch.exp2(exponents)).flatten()[: len(numbers)].to(numbers.dtype)

    def pack(self, numbers_n):
        codes, exponents = self.codes(numbers_n)
        pairs = (codes + 8).to(torch.uint8)
        return torch.cat([pairs[:, ::2] | pairs[:, 1::2] << 4, (exponents + 128).to(torch.uint8)], 1)

    def unpack(self, rows_UW):
        codes = torch.stack([rows_UW[:, :-1] & 15, rows_UW[:, :-1] >> 4], -1).flatten(1).float() - 8
        return (codes * torch.exp2(rows_UW[:, -1:].float() - 128)).flatten().bfloat16()


class PackedMaster(MasterWeight):
    """The packed weight alone."""

    def __init__(self, weight):
        self.weight = weight

    def load(self):
        return dequantize(self.weight).float()

    def store(self, value):
        self.weight.copy_(value)


class RoundsCoarsely(Uniform):
    """bfloat16, with packed weights of four bits, which are no nearer to what is stored than 18%."""

    def __init__(self, config):
        super().__init__(torch.bfloat16, NoLossScale())
        self.packed = set()

    def setup(self, seed, passes, gemm):
        self.passes = passes

    def convert(self, part: nn.Module) -> nn.Module:
        part = super().convert(part)
        for name, module, _ in tagged(part):
            keys = gemm_parameters(module)
            use_gemm(module, dict.fromkeys(keys, DequantizingGEMM(TorchGEMM(), FourBits())), self.passes)
            self.packed |= {f"{name}.{key}" for key in keys}
        return part

    def packing(self, name, parameter):
        return FourBits() if name in self.packed else None

    def master(self, weight, piece):
        return PackedMaster(weight) if isinstance(weight, PackedWeight) else super().master(weight, piece)


@hookimpl
def nanotrain_register_precision(register):
    register(twin(KeepsNormsWide))
    register(twin(RoundsAtRandom))
    register(twin(RoundsByTheStep, supports={"rounds_to_nearest": Support.UNSUPPORTED}))
    register(twin(ScalesByTheStep))
    lost = {"follows_float32": Support.UNSUPPORTED, "keeps_small_updates": Support.UNSUPPORTED}
    register(twin(RoundsCoarsely, supports=lost))
