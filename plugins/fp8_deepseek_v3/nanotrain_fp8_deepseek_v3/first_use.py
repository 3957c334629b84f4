"""Compares Triton's kernels on a device with the emulation, once, before a run relies on them.

A kernel compiled for an untested device could silently round or sum differently.
"""

from __future__ import annotations

from functools import cache

import torch

from nanotrain_fp8_deepseek_v3.fused import TritonFP8
from nanotrain_fp8_deepseek_v3.gemm import EmulatedFP8, Recipe

#: Relative error of sums of 128 terms on tensor cores (DeepSeek-V3, section 3.3.2).
SUMS = 2.0**-12
#: Rows of three experts; one has none, and no count fills a tile.
COUNTS = (40, 0, 105)


@cache
def disagreement(device: torch.device) -> str:
    """Return which GEMM of Triton's kernels differs from the emulation on ``device``; empty if none does."""
    for recipe in (Recipe(), Recipe(input_power_of_two=True, gradient_power_of_two=True)):
        for counts in (None, torch.tensor(COUNTS, device=device)):
            operands = _operands(device, experts=0 if counts is None else len(COUNTS))
            found, expected, sizes = (
                _products(make(recipe), counts, *each)
                for make, each in (
                    (TritonFP8, operands),
                    (EmulatedFP8, operands),
                    (EmulatedFP8, [each.abs() for each in operands]),
                )
            )
            for name in expected:
                if found[name].dtype != (dtype := expected[name].dtype):
                    return f"its {name} is {found[name].dtype}, not {dtype}, on {device}"
                bound = sizes[name].float() * SUMS + expected[name].float().abs() * torch.finfo(dtype).eps
                if not ((found[name].float() - expected[name].float()).abs() <= bound).all():
                    of = "a weight" if counts is None else "experts"
                    return f"its {name} of {of} is not that of the emulation on {device}"
    return ""


def _operands(device: torch.device, experts: int) -> list[torch.Tensor]:
    """Return x [M, K], w [N, K] or [E, N, K] and dy [M, N]: with an outlier column, and a tiny row."""
    M, K, N = sum(COUNTS), 200, 136
    numbers = torch.Generator().manual_seed(0)
    w_shape = (experts, N, K) if experts else (N, K)
    x, w, d_y = (torch.randn(*shape, generator=numbers) for shape in ((M, K), w_shape, (M, N)))
    x[:, 7] *= 300
    d_y[3] *= 1e-4
    return [each.bfloat16().to(device) for each in (x, w / 16, d_y)]


def _products(
    products: TritonFP8 | EmulatedFP8,
    counts: torch.Tensor | None,
    x: torch.Tensor,
    w: torch.Tensor,
    d_y: torch.Tensor,
) -> dict[str, torch.Tensor]:
    made = products if counts is None else products.grouped(counts)
    (y,), kept = made.forward(x, w)
    return {
        "y": y,
        "gradient of the input": made.dgrad(d_y, w),
        "gradient of the weight": made.wgrad(d_y, kept),
    }
