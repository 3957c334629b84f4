"""Operands for FP8 products, and a stand-in for torch's product of them on tensor cores."""

import pytest
import torch
import torch.nn.functional as F
from nanotrain_fp8_deepseek_v3.formats import E5M2
from nanotrain_fp8_deepseek_v3.gemm import FP8Recipe
from torch._subclasses.fake_tensor import FakeTensorMode

TILED, WHOLE = FP8Recipe(), FP8Recipe(tile=0, gradients=E5M2)
POWERS = FP8Recipe(input_power_of_two=True, gradient_power_of_two=True)
RECIPES = pytest.mark.parametrize("recipe", [TILED, POWERS, WHOLE], ids=["tiled", "powers", "whole"])
SHAPES = pytest.mark.parametrize("shape", [(96, 128, 256), (130, 200, 72), (5, 384, 16)], ids=str)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def outliers(*shape, seed=0):
    x = normal(*shape, seed=seed)
    x[:, 7] *= 300
    x[3] *= 1e-3
    return x


def checked_product(
    left, right, scales_left, recipe_left, scales_right, recipe_right, output_dtype, **swizzles
):
    """Have torch check the operands as those of a CUDA device, then multiply them here."""
    given = (left, right, scales_left, scales_right)
    with FakeTensorMode():
        fake = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in given]
        how = {"output_dtype": output_dtype, **swizzles}
        MULTIPLY(fake[0], fake[1], fake[2], recipe_left, fake[3], recipe_right, **how)
    a = left.float() * spread(scales_left, recipe_left, left.shape)
    b = right.T.float() * spread(scales_right, recipe_right, right.T.shape)
    return (a @ b.T).to(output_dtype)


MULTIPLY = F.scaled_mm


def spread(scales, recipe, shape):
    """Return a scale for every element of [R, C]."""
    if recipe is F.ScalingType.TensorWise:
        return scales
    if recipe is F.ScalingType.BlockWise1x32:
        return unswizzled(scales, shape).repeat_interleave(32, 1)
    if recipe is F.ScalingType.BlockWise1x128:
        return scales.repeat_interleave(128, 1)
    blocks = scales.T[:, : shape[1] // 128]
    return blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)


def unswizzled(scales, shape):
    """Return the scales [R, C / 32] that tensor cores read: see ``test_mx.py`` for their order."""
    row, column = torch.arange(shape[0])[:, None], torch.arange(shape[1] // 32)
    tile = row // 128 * -(-len(column) // 4) + column // 4
    return scales.float()[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4]
