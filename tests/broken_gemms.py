"""Precisions that lose something of an x made anew, one fault each: see ``broken_twins.py``."""

import torch
from broken_twins import twin

from nanotrain_core import hookimpl
from nanotrain_core.layout.roles import tagged
from nanotrain_core.precision.gemm import TorchGEMM, gemm_parameters, use_gemm
from nanotrain_core.precision.loss_scale import NoLossScale
from nanotrain_core.precision.uniform import Uniform


class Kept(TorchGEMM):
    """Multiplies as PyTorch does, and keeps x as it is, or as ``narrowed`` when it is made anew."""

    def narrowed(self, x_MK):
        return x_MK

    def forward(self, x_MK, *weights_NK):
        return [x_MK @ weight_NK.T for weight_NK in weights_NK], (x_MK,)

    def save_for_wgrad(self, x_MK):
        return (self.narrowed(x_MK),)

    def wgrad(self, d_y_MN, kept):
        return d_y_MN.T @ kept[0]


class Rounds(Kept):
    def narrowed(self, x_MK):
        return x_MK.to(torch.float8_e4m3fn).to(x_MK.dtype)


class Scales(Kept):
    def narrowed(self, x_MK):
        return x_MK / x_MK.abs().amax()


class Cuts(Kept):
    def narrowed(self, x_MK):
        x_MK = x_MK.clone()
        x_MK[len(x_MK) // 128 * 128 :] = 0.0
        return x_MK


class RoundsWhatIsMadeAnew(Uniform):
    """Keeps eight bits of it."""

    backend = Rounds

    def __init__(self, config):
        del config
        super().__init__(torch.bfloat16, NoLossScale())

    def setup(self, seed, passes, gemm):
        self.passes = passes

    def convert(self, part):
        part = super().convert(part)
        for _, module, _ in tagged(part):
            use_gemm(module, dict.fromkeys(gemm_parameters(module), self.backend()), self.passes)
        return part


class ScalesWhatIsMadeAnew(RoundsWhatIsMadeAnew):
    """Divides it by its largest element, and forgets that."""

    backend = Scales


class CutsWhatIsMadeAnew(RoundsWhatIsMadeAnew):
    """Keeps whole blocks of 128 rows, and no rest."""

    backend = Cuts


@hookimpl
def nanotrain_register_precision(register):
    for cls in (RoundsWhatIsMadeAnew, ScalesWhatIsMadeAnew, CutsWhatIsMadeAnew):
        register(twin(cls))
