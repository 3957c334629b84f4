"""What the ``triton`` backend asks of its kernels, and how often: with stand-ins for them, without Triton."""

import sys
from collections import Counter
from importlib import import_module
from types import ModuleType, SimpleNamespace

import pytest
import torch
from nanotrain_fp8_deepseek_v3 import scaled
from nanotrain_fp8_deepseek_v3.formats import E4M3, TILE, dequantize, quantize
from nanotrain_fp8_deepseek_v3.gemm import FP8Recipe
from nanotrain_fp8_deepseek_v3.operand_cache import OperandCache
from nanotrain_fp8_deepseek_v3.scaled import ScaledFP8
from torch import nn

from nanotrain_core.pipeline.passes import Passes

PACKAGE = "nanotrain_fp8_deepseek_v3"
M, K, N = 256, 384, 128  # whole tiles


def product(left, right, of_left, recipe_left, of_right, recipe_right, output_dtype):
    """Multiply as tensor cores do."""

    def spread(codes, scales, recipe):
        if recipe is torch.nn.functional.ScalingType.BlockWise1x128:
            return codes.float() * scales.repeat_interleave(TILE, 1)
        blocks = scales.T[:, : codes.shape[1] // TILE]
        return codes.float() * blocks.repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)

    a, b = spread(left, of_left, recipe_left), spread(right.T, of_right, recipe_right)
    return (a @ b.T).to(output_dtype)


@pytest.fixture
def launched(monkeypatch):
    """Return how often each kernel is launched, and the backend over stand-ins."""
    seen = Counter()

    def rows(x, form=E4M3, *, power_of_two=False):
        seen["rows"] += 1
        return scaled.quantize_tiles(x, form, power_of_two=power_of_two)

    def transposed(x, groups=None, form=E4M3, *, power_of_two=False):
        seen["transposed"] += 1
        return scaled.quantize_tiles(x.T, form, power_of_two=power_of_two)

    def again(codes, scales, groups=None, *, power_of_two=False):
        seen["transposed from rows"] += 1
        return scaled.quantize_tiles(dequantize(codes, scales, E4M3).T, E4M3, power_of_two=power_of_two)

    def blocks(weight):
        seen["blocks"] += 1
        ways = []
        for way in (weight.detach(), weight.detach().T):
            tiled = quantize(way, (TILE, TILE))
            scales = tiled.scales.flatten(1)
            ways += [tiled.codes()[None], torch.nn.functional.pad(scales, (0, -scales.shape[1] % 4))[None]]
        return SimpleNamespace(codes_ENK=ways[0], scales_Enk=ways[1], codes_EKN=ways[2], scales_Ekn=ways[3])

    stand_ins = {
        "triton_kernels": {},
        "triton_kernels.quantize_blocks": {"Blocks": object, "quantize_blocks": blocks},
        "triton_kernels.experts": {"multiply_columns": None, "multiply_rows": None},
        "triton_kernels.layout": {"Groups": object},
        "triton_kernels.quantize_rows": {"quantize_rows": rows},
        "triton_kernels.quantize_swiglu": {
            "Backward": object,
            "quantize_swiglu": None,
            "requantize_swiglu": None,
        },
        "triton_kernels.quantize_transposed": {
            "quantize_transposed": transposed,
            "requantize_transposed": again,
        },
    }
    for name, content in stand_ins.items():
        module = ModuleType(f"{PACKAGE}.{name}")
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, f"{PACKAGE}.fused", raising=False)
    monkeypatch.setattr(scaled.F, "scaled_mm", product)
    yield seen, import_module(f"{PACKAGE}.fused").TritonFP8
    sys.modules.pop(f"{PACKAGE}.fused", None)


def numbers(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize(
    "recipe",
    [FP8Recipe(), FP8Recipe(input_power_of_two=True, gradient_power_of_two=True)],
    ids=["float32", "powers"],
)
def test_three_layers_that_read_one_input_round_it_once_in_each_direction(launched, recipe):
    """Two microbatches: each weight is rounded once for both. Numbers are those of the ``torch`` backend."""
    seen, backend = launched
    weights = [nn.Parameter(numbers(N, K, seed=seed)) for seed in range(3)]
    results = []
    for make in (backend, ScaledFP8):
        passes, found = Passes(), []
        cache = OperandCache(passes)
        layers = [make(recipe, cache) for _ in weights]
        with passes.weights_unchanged():
            for microbatch in range(2):
                x, d_y = numbers(M, K, seed=10 + microbatch), numbers(M, N, seed=20 + microbatch)
                made = [layer.forward(x, w) for layer, w in zip(layers, weights, strict=True)]
                assert len({kept[0].untyped_storage().data_ptr() for _, kept in made}) == 1  # kept once
                for layer, w, ((y,), kept) in zip(layers, weights, made, strict=True):
                    found += [y, layer.dgrad(d_y, w), layer.wgrad(d_y, kept)]
        results.append(found)
    assert seen == {"rows": 2 * (1 + 3), "transposed": 2 * 3, "transposed from rows": 2, "blocks": 3}
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_an_input_that_was_written_is_rounded_anew(launched):
    seen, backend = launched
    layer, x, w = backend(FP8Recipe()), numbers(M, K, seed=0), numbers(N, K, seed=1)
    (before,), _ = layer.forward(x, w)
    x.mul_(-1)
    (after,), _ = layer.forward(x, w)
    assert torch.equal(after, -before)
    assert seen["rows"] == 2
