"""A plugin: FP8 as it is, and everything around it in float64, so that one process and many can be compared.

In bfloat16 sums in another order move a number now and then to another code, and after that all numbers.
Here operands are rounded to the same tiles or tensors, but multiplied and added up in float64.
"""

import attrs
from nanotrain_fp8_deepseek_v3.configs import FP8DeepSeekV3Config, FP8HybridConfig, MXFP8Config, NVFP4Config

from nanotrain_core import hookimpl
from nanotrain_core.component import Component


@attrs.define(frozen=True, kw_only=True)
class HybridConfig(FP8HybridConfig):
    """``[precision] use = "exact_hybrid"``."""

    parts: int = 1
    """Round in one process what so many tensor-parallel ranks would, each the part that it has."""


@hookimpl
def nanotrain_register_precision(register):
    configs = {
        "exact_fp8": FP8DeepSeekV3Config,
        "exact_hybrid": HybridConfig,
        "exact_mx": MXFP8Config,
        "exact_nvfp4": NVFP4Config,
    }
    for name, config in configs.items():
        register(Component(name=name, config=config, factory=f"{__name__}:build", summary="FP8 in float64"))


def build(config):
    import torch
    from nanotrain_fp8_deepseek_v3.formats import quantize
    from nanotrain_fp8_deepseek_v3.gemm import EmulatedFP8
    from nanotrain_fp8_deepseek_v3.mx import EmulatedMX
    from nanotrain_fp8_deepseek_v3.nvfp4.gemm import EmulatedNVFP4
    from nanotrain_fp8_deepseek_v3.precision import MXFP8, NVFP4, FP8DeepSeekV3, FP8Hybrid

    from nanotrain_core.layout.roles import Role

    parts = getattr(config, "parts", 1)

    emulations = {MXFP8Config: EmulatedMX, NVFP4Config: EmulatedNVFP4}

    class Wide(emulations.get(type(config), EmulatedFP8)):
        """Emulated products whose operands are float64 numbers of the format."""

        def of_weight(self, weight):
            return tuple(form.double() for form in super().of_weight(weight))

        def of_input(self, x):
            values, kept = super().of_input(x)
            return values.double(), kept

        def of_kept(self, kept):
            return super().of_kept(kept).double()

        def of_gradient(self, d_y, *, for_weight):
            return super().of_gradient(d_y, for_weight=for_weight).double()

        def of_kept_gradient(self, kept):
            return super().of_kept_gradient(kept).double()

    class Column(Wide):
        """What a rank has of a layer cut by its outputs: some of the weight's rows and of dy's columns."""

        def of_weight(self, weight):
            return (quantize(weight.detach(), (len(weight) // parts, 0)).values().double(),)

        def of_gradient(self, d_y, *, for_weight):
            return in_columns(d_y, self.recipe.gradients)

    class Row(Wide):
        """What a rank has of a layer cut by its inputs: some of the weight's columns and of x's."""

        def of_weight(self, weight):
            return (in_columns(weight.detach()),)

        def of_input(self, x):
            values = in_columns(x)
            return values, (values,)

        def of_kept(self, kept):
            return kept[0]

    def in_columns(x, *form):
        return quantize(x, (0, x.shape[1] // parts), *form).values().double()

    kinds = {
        MXFP8Config: MXFP8,
        HybridConfig: FP8Hybrid,
        FP8DeepSeekV3Config: FP8DeepSeekV3,
        NVFP4Config: NVFP4,
    }

    class Exact(kinds[type(config)]):
        def __init__(self, config):
            super().__init__(config)
            self.parameter_dtype = self.gradient_dtype = torch.float64

        def _backends(self, name, module, tag, make):
            cut = {Role.COLUMN: Column, Role.ROW: Row} if parts > 1 else {}
            return super()._backends(name, module, tag, cut.get(tag.role, Wide))

    return Exact(config)
