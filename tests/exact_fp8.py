"""A plugin: FP8 as it is, and everything around it in float64, so that one process and many can be compared.

In bfloat16 sums in another order move a number now and then to another code, and after that all numbers.
Here operands are rounded to the same E4M3 tiles, but multiplied and added up in float64.
"""

from nanotrain_fp8_deepseek_v3 import FP8DeepSeekV3Config

from nanotrain_core import hookimpl
from nanotrain_core.component import Component


@hookimpl
def nanotrain_register_precision(register):
    factory = f"{__name__}:build"
    register(
        Component(name="exact_fp8", config=FP8DeepSeekV3Config, factory=factory, summary="FP8 in float64")
    )


def build(config):
    import torch
    from nanotrain_fp8_deepseek_v3.precision import FP8DeepSeekV3
    from nanotrain_fp8_deepseek_v3.products import EmulatedFP8

    class Wide(EmulatedFP8):
        """Emulated products whose operands are float64 numbers of FP8."""

        def of_weight(self, weight):
            return super().of_weight(weight).double()

        def of_input(self, x):
            values, kept = super().of_input(x)
            return values.double(), kept

        def of_kept(self, kept):
            return super().of_kept(kept).double()

        def of_gradient(self, d_y, *, for_weight):
            return super().of_gradient(d_y, for_weight=for_weight).double()

    class Exact(FP8DeepSeekV3):
        def __init__(self, config):
            super().__init__(config)
            self.parameter_dtype = self.gradient_dtype = torch.float64

        def _products(self, name, module, tag, make):
            return super()._products(name, module, tag, Wide)

    return Exact(config)
