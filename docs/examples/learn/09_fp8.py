"""Lesson 9: FP8. Look at: one outlier ruins the precision of all numbers with the same scale.

    python docs/examples/learn/09_fp8.py

E4M3 has 3 bits of mantissa and reaches from 2^-9 to 448. Numbers are multiplied by a scale that brings the
largest of them to 448. With one scale for a whole tensor an outlier moves all others to where the spacing
is coarse, or to zero. DeepSeek-V3 gives each row of 128 numbers a scale of its own. Source: arXiv
2412.19437, section 3.3.
"""

import torch
from common import engine_of

from nanotrain_core.testing import run_ranks

PLAIN = ['kernels={use="torch"}', "run.steps=20", "model.width=128", "model.layers=2", "model.ffn=128"]


def quantized(x, scale):
    """Round to E4M3 and back."""
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


def errors():
    """Return the relative error of 8 rows with an outlier: with one scale, and one for each 128."""
    x = torch.randn(8, 512, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 1000
    x[3, 200] = 300.0
    whole = quantized(x, x.abs().max() / 448)
    tiles = x.view(8, 4, 128)
    each = quantized(tiles, tiles.abs().amax(-1, keepdim=True) / 448).view_as(x)
    others = torch.ones_like(x, dtype=torch.bool)
    others[3, 200] = False
    return [((y - x)[others].norm() / x[others].norm()).item() for y in (whole, each)]


def losses(precision):
    """Return the loss of the last step."""
    engine, seen = engine_of([*PLAIN, f'precision={{use="{precision}"}}'])
    engine.fit()
    return seen[-1]


def main():
    tensor, tile = errors()
    print(
        f"relative error of all but the outlier: one scale {tensor:.0%}, a scale for 128 numbers {tile:.0%}"
    )
    for precision in ("fp32", "bf16", "fp8_deepseek_v3"):
        (loss,) = run_ranks(losses, 1, precision)
        print(f"{precision}: loss {loss:.1f} after 20 steps")


if __name__ == "__main__":
    main()
