"""Precisions with one deliberate fault each: see ``broken_twins.py``."""

import torch
from broken_twins import twin
from torch import nn

from nanotrain_core import hookimpl
from nanotrain_core.layout.placement import RANGE
from nanotrain_core.layout.roles import tagged
from nanotrain_core.precision.dequantizing_gemm import DequantizingGEMM
from nanotrain_core.precision.gemm import TorchGEMM, gemm_parameters, use_gemm
from nanotrain_core.precision.loss_scale import NoLossScale
from nanotrain_core.precision.uniform import Float32Master, Uniform


class ForgetfulMaster(Float32Master):
    """Keeps the new weight and never shows it to the model."""

    plain = None

    def store(self, value):
        self.master.copy_(value)


class ForgetsToWriteThrough(Uniform):
    def __init__(self, config):
        super().__init__(torch.bfloat16, NoLossScale())

    def master(self, weight, piece):
        return ForgetfulMaster(weight)


class MisplacedMaster(Float32Master):
    """Has an optimizer update a copy of the master, which no checkpoint holds."""

    @property
    def plain(self):
        return self.master.clone(), self.weight


class HasCopiesUpdated(Uniform):
    def __init__(self, config):
        super().__init__(torch.bfloat16, NoLossScale())

    def master(self, weight, piece):
        return MisplacedMaster(weight)


class ForgetsItsMasters(Uniform):
    """Saves weights in bfloat16 and nothing else."""

    def __init__(self, config):
        super().__init__(torch.bfloat16, NoLossScale())

    def master(self, weight, piece):
        master = super().master(weight, piece)
        master.state = dict
        return master


class NoWeightGradient(TorchGEMM):
    def wgrad(self, d_y_MN, kept):
        return torch.zeros_like(super().wgrad(d_y_MN, kept))


class UsesPasses(Uniform):
    """bfloat16, with GEMM backends that know the passes."""

    def __init__(self, config):
        super().__init__(torch.bfloat16, NoLossScale())
        self.packed = set()

    def setup(self, seed, passes, gemm):
        self.passes = passes


class LosesOneGradient(UsesPasses):
    """Gives one linear layer of all a backend that forgets its weight's gradient.

    One without which losses are 4% from float32's in the mean; without that of a query, they are 1%.
    """

    def convert(self, part):
        for module in [module for name, module, _ in tagged(part) if name.endswith("ffn.down")][:1]:
            use_gemm(module, dict.fromkeys(gemm_parameters(module), NoWeightGradient()), self.passes)
        return super().convert(part)


class Bytes:
    """bfloat16 as it is, but for a last row that is not full."""

    name, width = "bytes", 2 * RANGE

    def rounded(self, numbers):
        return numbers.bfloat16()

    def pack(self, numbers):
        whole = len(numbers) // RANGE * RANGE
        missing = numbers.new_zeros(-(-len(numbers) // RANGE) * RANGE - whole)
        return torch.cat([numbers[:whole], missing]).bfloat16().view(-1, RANGE).view(torch.uint8)

    def unpack(self, rows):
        return rows.view(torch.bfloat16).flatten()


class LosesTheLastRow(UsesPasses):
    def convert(self, part):
        for name, module, _ in tagged(part):
            backend = DequantizingGEMM(TorchGEMM())
            use_gemm(module, dict.fromkeys(gemm_parameters(module), backend), self.passes)
            self.packed |= {f"{name}.{key}" for key in gemm_parameters(module)}
        return super().convert(part)

    def packing(self, name, parameter):
        return Bytes() if name in self.packed else None


class UnitGEMM(TorchGEMM):
    """Multiplies numbers of size one: x is divided by the root of how many inputs there are, y multiplied."""

    def __init__(self, inputs):
        self.inputs = inputs

    def forward(self, x_MK, *weights_NK):
        ys, _ = super().forward(x_MK / self.inputs**0.5, *weights_NK)
        return [y * weight.shape[1] ** 0.5 for y, weight in zip(ys, weights_NK, strict=True)], (x_MK,)


class AsksTheModuleForItsSize(UsesPasses):
    """Takes the number of inputs from ``in_features``, which is the whole layer's, where a rank has some."""

    def convert(self, part):
        for _, module, _ in tagged(part):
            if isinstance(module, nn.Linear) and gemm_parameters(module):
                use_gemm(module, {"weight": UnitGEMM(module.in_features)}, self.passes)
        return super().convert(part)


@hookimpl
def nanotrain_register_precision(register):
    for cls in (
        ForgetsToWriteThrough,
        HasCopiesUpdated,
        ForgetsItsMasters,
        LosesOneGradient,
        LosesTheLastRow,
        AsksTheModuleForItsSize,
    ):
        register(twin(cls))
