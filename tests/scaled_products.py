"""``torch.nn.functional.scaled_mm`` on a CPU, for tests of who calls it: codes times their scales."""

import torch
from nanotrain_fp8_deepseek_v3.formats import TILE


def product(left, right, of_left, recipe_left, of_right, recipe_right, output_dtype):
    """Multiply as tensor cores do."""

    def spread(codes, scales, recipe):
        values = codes.float()
        if recipe is torch.nn.functional.ScalingType.BlockWise1x128:
            return values * scales.repeat_interleave(TILE, 1)
        if recipe is torch.nn.functional.ScalingType.TensorWise:
            return values * scales
        blocks = scales.T[:, : codes.shape[1] // TILE]
        return values * blocks.repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)

    a, b = spread(left, of_left, recipe_left), spread(right.T, of_right, recipe_right)
    return (a @ b.T).to(output_dtype)
