"""Pieces of parameters, for tests of masters by themselves."""

import torch
from nanotrain_fp4_master import FP4MasterConfig
from nanotrain_fp4_master.precision import FP4Master
from torch import nn

from nanotrain_core.layout.initialization import replace_parameter
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.placement import Piece, Placement
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.precision.gemm import TorchGEMM
from nanotrain_core.precision.quantized_storage import PackedWeight

LAYOUT = Layout({"dense": View(("dp", "tp"), (2, 2))})

FOUR_BIT = [(form, variant) for form in ("nvfp4", "nf4") for variant in ("residual", "eco", "naive")]
BFLOAT16 = [("bf16", variant) for variant in ("remainder", "residual", "eco", "naive")]


def numbers(*shape, seed=0, scale=0.05):
    """Return normal float32 numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def master_of(value, form, variant, *, span=None, placement=None, seed=0, **config):
    """Return a precision, and its master of a bfloat16 parameter that starts as ``value``."""
    precision = FP4Master(FP4MasterConfig(format=form, variant=variant, **config))
    precision.setup(seed, Passes(), TorchGEMM())
    parameter = nn.Parameter(value.bfloat16(), requires_grad=False)
    placement = placement or Placement.whole("layers.0.w", value.shape, LAYOUT)
    piece = Piece(parameter, placement, span)
    return precision, precision.master(piece.weight, piece)


def pack(part, precision):
    """Replace the parameters of a part that a precision packs, as a run does."""
    for name, parameter in [*part.named_parameters()]:
        if (packing := precision.packing(name, parameter)) is not None:
            trained = parameter.requires_grad
            replace_parameter(
                part, name, nn.Parameter(PackedWeight.of(parameter, packing, trained=trained), trained)
            )
