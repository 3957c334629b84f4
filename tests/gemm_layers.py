"""A plugin: float64 with an exact GEMM backend behind every linear layer, and expert, that takes one."""

from nanotrain_core import hookimpl
from nanotrain_core.builtin.configs import PrecisionConfig
from nanotrain_core.component import Component


@hookimpl
def nanotrain_register_precision(register):
    factory = f"{__name__}:build"
    register(Component(name="exact", config=PrecisionConfig, factory=factory, summary="exact GEMM backends"))


def build(config):
    import torch

    from nanotrain_core.layout.roles import tagged
    from nanotrain_core.precision.gemm import GEMMBackend, gemm_parameters, use_gemm
    from nanotrain_core.precision.loss_scale import NoLossScale
    from nanotrain_core.precision.uniform import Uniform

    class Exact(GEMMBackend):
        """Keeps of an input its half, as if in another format."""

        groups = None

        def __init__(self, passes):
            self.passes = passes

        def grouped(self, counts_E):
            new = Exact(self.passes)
            new.groups = counts_E.tolist()
            return new

        def forward(self, x_MK, *weights_NK):
            assert self.passes.weights_version is not None
            return [self.times(x_MK, weight.mT) for weight in weights_NK], self.save_for_wgrad(x_MK)

        def save_for_wgrad(self, x_MK):
            return (x_MK / 2,)

        def dgrad(self, d_y_MN, weight_NK):
            return self.times(d_y_MN, weight_NK)

        def wgrad(self, d_y_MN, kept):
            if self.groups is None:
                return d_y_MN.T @ kept[0] * 2
            pairs = zip(d_y_MN.split(self.groups), kept[0].split(self.groups), strict=True)
            return torch.stack([d_y.T @ x * 2 for d_y, x in pairs])

        def times(self, rows, right):
            if self.groups is None:
                return rows @ right
            return torch.cat([own @ w for own, w in zip(rows.split(self.groups), right, strict=True)])

    class ExactGEMMs(Uniform):
        def setup(self, seed, passes, gemm):
            self.passes = passes

        def check_parts(self, parts, mesh):
            self.names = []
            for part in parts:
                for name, module, _ in tagged(part):
                    use_gemm(module, dict.fromkeys(gemm_parameters(module), Exact(self.passes)), self.passes)
                    self.names += [f"{name}.{key}" for key in gemm_parameters(module)]

        def describe(self):
            return self.names

    return ExactGEMMs(torch.float64, NoLossScale())
