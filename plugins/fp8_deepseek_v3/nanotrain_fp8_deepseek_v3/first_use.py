"""Compares kernels on a device with the emulation, once, before a run relies on them.

A kernel of Triton compiled for an untested device, or torch's GEMMs of MX and NVFP4, which none of our tests
has run, could silently round or sum differently.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import cast

import torch
import torch.nn.functional as F

from nanotrain_core.api.torch import QuantizedInput, SavedTensors, swiglu
from nanotrain_fp8_deepseek_v3.families import SCALED
from nanotrain_fp8_deepseek_v3.formats import E4M3, dequantize
from nanotrain_fp8_deepseek_v3.gemm import EmulatedFP8, Emulation, FP8Recipe
from nanotrain_fp8_deepseek_v3.recipe import LowBitGEMM, Recipe

#: Relative error of sums of 128 terms on tensor cores (DeepSeek-V3, section 3.3.2).
SUMS = 2.0**-12
#: Rows of three experts; one has none, and no count fills a tile.
COUNTS = (40, 0, 105)


@cache
def disagreement(device: torch.device) -> str:
    """Return which GEMM of Triton's kernels differs from the emulation on ``device``; empty if none does."""
    from nanotrain_fp8_deepseek_v3.fused import TritonFP8

    for recipe in (FP8Recipe(), FP8Recipe(input_power_of_two=True, gradient_power_of_two=True)):
        if differs := _differs(device, TritonFP8(recipe), EmulatedFP8(recipe)):
            return differs
    wrong = [name for name, right in _swiglu(device) if not right]
    return f"its {wrong[0]} of SwiGLU is not that of the emulation on {device}" if wrong else ""


@cache
def disagreement_of_torch(device: torch.device, recipe: Recipe) -> str:
    """Return which of torch's GEMMs differs from the emulation on ``device``; empty if none does."""
    return _differs(device, SCALED[type(recipe)](recipe), recipe.emulated())


def _differs(device: torch.device, ours: LowBitGEMM, theirs: Emulation) -> str:
    """Return which GEMM differs, of a weight or of experts."""
    for counts in (None, torch.tensor(COUNTS, device=device)):
        operands = _operands(device, experts=0 if counts is None else len(COUNTS))
        found, expected = (_products(products, counts, *operands) for products in (ours, theirs))
        sizes = _products(theirs, counts, *(each.abs() for each in operands))
        for name in expected:
            if found[name].dtype != (dtype := expected[name].dtype):
                return f"its {name} is {found[name].dtype}, not {dtype}, on {device}"
            bound = sizes[name].float() * SUMS + expected[name].float().abs() * torch.finfo(dtype).eps
            if not ((found[name].float() - expected[name].float()).abs() <= bound).all():
                of = "a weight" if counts is None else "experts"
                return f"its {name} of {of} is not that of the emulation on {device}"
    return ""


def _swiglu(device: torch.device) -> Iterator[tuple[str, bool]]:
    """Yield what was compared, and whether SwiGLU's kernels agree with torch and with emulated rounding."""
    from nanotrain_fp8_deepseek_v3.fused import TritonFP8

    numbers = torch.Generator().manual_seed(0)
    gate, up, d_h = (torch.randn(sum(COUNTS), 200, generator=numbers) for _ in range(3))
    gate[:, 7] *= 30
    up[:, 7] *= 300
    d_h[3] *= 1e-4
    gate, up, d_h = (each.bfloat16().to(device) for each in (gate, up, d_h))
    for power_of_two in (False, True):
        recipe = FP8Recipe(input_power_of_two=power_of_two, quantize_swiglu=True)
        ours, theirs = TritonFP8(recipe), EmulatedFP8(recipe)
        made = ours.swiglu(gate, up, whole=True)
        if made is None:
            return  # nothing is fused
        h, of_gate, of_up = made
        yield from _output(h, swiglu(gate, up), theirs)
        for found, x in zip((of_gate, of_up), (gate, up), strict=True):
            yield "rounded input", _same(found, cast(SavedTensors, theirs.quantize(x)))
        gate_again, up_again = (theirs.dequantize(each, gate.dtype) for each in (of_gate, of_up))
        h, d_gate, d_up = ours.swiglu_backward(of_gate, of_up, d_h, whole=True)
        yield from _output(h, swiglu(gate_again, up_again), theirs)
        yield "gradient of up", _near(d_up, d_h * F.silu(gate_again))
        terms = d_h * up_again
        expected = torch.ops.aten.silu_backward(terms, gate_again)
        yield "gradient of gate", _near(d_gate, expected, terms)


def _output(h: QuantizedInput, expected: torch.Tensor, theirs: EmulatedFP8) -> Iterator[tuple[str, bool]]:
    assert h.whole is not None
    (M, N), (codes, scales) = expected.shape, h.forms
    yield "output", _near(h.whole, expected)
    yield "rounded output", _same((codes[:M, :N], scales[:M]), theirs.save_for_wgrad(h.whole))


def _near(found: torch.Tensor, expected: torch.Tensor, terms: torch.Tensor | None = None) -> bool:
    """Return whether all are equal up to two roundings of their dtype; ``terms``: terms that may cancel."""
    bound = 2 * torch.finfo(expected.dtype).eps * expected.float().abs()
    bound += (0.0 if terms is None else terms.float().abs() * 2.0**-18) + 2.0**-126
    return found.dtype == expected.dtype and bool(((found.float() - expected.float()).abs() <= bound).all())


def _same(found: SavedTensors, expected: SavedTensors) -> bool:
    """Return whether two pairs of codes and scales dequantize to the same values."""
    return torch.equal(dequantize(found[0], found[1], E4M3), dequantize(expected[0], expected[1], E4M3))


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
    products: LowBitGEMM,
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
