"""Operands of products, and a stand-in for torch's product of them on tensor cores."""

import pytest
import torch
import torch.nn.functional as F
from nanotrain_fp8_deepseek_v3.formats import E5M2
from nanotrain_fp8_deepseek_v3.gemm import FP8Recipe
from nanotrain_fp8_deepseek_v3.nvfp4.format import unpack
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

TILED, WHOLE = FP8Recipe(), FP8Recipe(tile=0, gradients=E5M2)
POWERS = FP8Recipe(input_power_of_two=True, gradient_power_of_two=True)
RECIPES = pytest.mark.parametrize("recipe", [TILED, POWERS, WHOLE], ids=["tiled", "powers", "whole"])
SHAPES = pytest.mark.parametrize("shape", [(96, 128, 256), (130, 200, 72), (5, 384, 16)], ids=str)
RAGGED = pytest.mark.parametrize("shape", [(96, 128, 256), (70, 200, 72), (5, 32, 16)], ids=str)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def outliers(*shape, seed=0):
    x = normal(*shape, seed=seed)
    x[:, 7] *= 300
    x[3] *= 1e-3
    return x


def products_of(products, x, weight, d_y):
    (y,), kept = products.forward(x, weight)
    return y, products.dgrad(d_y, weight), products.wgrad(d_y, kept)


def assert_near(found, expected):
    """Compare by the size of the result: float32 sums in another order, and results rounded to bfloat16."""
    for ours, theirs in zip(found, expected, strict=True):
        rtol = 1e-5 if ours.dtype == torch.float32 else 2.0**-8
        atol = 1e-5 * theirs.abs().max().item()
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=rtol, atol=atol)


def checked_product(left, right, scales_left, kind_left, scales_right, kind_right, output_dtype, **swizzles):
    """Have torch check the operands as those of a CUDA device, then multiply them here."""
    with FakeTensorMode():
        a, b, of_a, of_b = tree_map(on_cuda, (left, right, scales_left, scales_right))
        MULTIPLY(a, b, of_a, kind_left, of_b, kind_right, output_dtype=output_dtype, **swizzles)
    a, b = values(left, scales_left, kind_left), values(right.T, scales_right, kind_right)
    return (a @ b.T).to(output_dtype)


def on_cuda(t):
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")


MULTIPLY = F.scaled_mm


def values(codes, scales, kind):
    """Return the numbers of an operand [R, C]; NVFP4's has scales of blocks, and one of the tensor."""
    if not isinstance(kind, list):
        return codes.float() * spread(scales, kind, codes.shape)
    of_blocks, of_tensor = scales
    numbers = unpack(codes.view(torch.uint8), -1)
    return numbers * unswizzled(of_blocks, numbers.shape, 16).repeat_interleave(16, 1) * of_tensor


def spread(scales, recipe, shape):
    """Return a scale for every element of [R, C]."""
    if recipe is F.ScalingType.TensorWise:
        return scales
    if recipe is F.ScalingType.BlockWise1x32:
        return unswizzled(scales, shape, 32).repeat_interleave(32, 1)
    if recipe is F.ScalingType.BlockWise1x128:
        return scales.repeat_interleave(128, 1)
    blocks = scales.T[:, : shape[1] // 128]
    return blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)


def unswizzled(scales, shape, block):
    """Return the scales [R, C / block] that tensor cores read: see ``test_mx.py`` for their order."""
    row, column = torch.arange(shape[0])[:, None], torch.arange(shape[1] // block)
    tile = row // 128 * -(-len(column) // 4) + column // 4
    index = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
    return scales.view(torch.uint8)[index].view(scales.dtype).float()
