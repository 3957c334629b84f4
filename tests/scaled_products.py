"""``torch.nn.functional.scaled_mm`` on a CPU, for tests of who calls it: codes times their scales."""

import torch
from nanotrain_fp8_deepseek_v3.formats import TILE


def product(left, right, of_left, recipe_left, of_right, recipe_right, output_dtype, **swizzles):
    """Multiply as tensor cores do."""

    def spread(codes, scales, recipe):
        values = codes.float()
        if recipe is torch.nn.functional.ScalingType.BlockWise1x128:
            return values * scales.repeat_interleave(TILE, 1)
        if recipe is torch.nn.functional.ScalingType.BlockWise1x32:
            return values * in_order(scales, codes.shape).repeat_interleave(32, 1)
        if recipe is torch.nn.functional.ScalingType.TensorWise:
            return values * scales
        blocks = scales.T[:, : codes.shape[1] // TILE]
        return values * blocks.repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)

    a, b = spread(left, of_left, recipe_left), spread(right.T, of_right, recipe_right)
    return (a @ b.T).to(output_dtype)


def in_order(scales, shape):
    """Return the scales [R, C / 32] of MX, which lie in tiles of 128 x 4."""
    row, column = torch.arange(shape[0])[:, None], torch.arange(shape[1] // 32)
    tile = row // 128 * -(-len(column) // 4) + column // 4
    return scales.float()[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4]
