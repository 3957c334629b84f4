"""SwiGLU and its rounding in one kernel: codes are formats.py's bit for bit, and values torch's SwiGLU."""

import pytest
import torch
import torch.nn.functional as F
from fp8_codes import ALL, DTYPES, POWERS, SHAPES, assert_same, numbers
from fp8_operands import checked_product, normal, outliers
from nanotrain_fp8_deepseek_v3 import first_use, scaled
from nanotrain_fp8_deepseek_v3.formats import E4M3, TILE, dequantize, quantize
from nanotrain_fp8_deepseek_v3.fused import TritonFP8
from nanotrain_fp8_deepseek_v3.gemm import FP8Recipe
from nanotrain_fp8_deepseek_v3.triton_kernels.quantize_swiglu import quantize_swiglu, requantize_swiglu

from nanotrain_core.layout.roles import Role, tag, tagged
from nanotrain_core.models.feed_forward import SwiGLU
from nanotrain_core.models.ops import swiglu
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.precision.gemm import use_gemm
from nanotrain_core.precision.quantized_swiglu import quantize_swiglu as quantize_layers

QUANTIZED = FP8Recipe(quantize_swiglu=True)


def assert_close(found, expected, terms=None):
    """Compare to two roundings, in float32 to the exponential's error at -88; ``terms``: of a sum."""
    assert found.dtype == expected.dtype
    assert torch.equal(found.isfinite(), expected.isfinite())
    assert torch.equal(found.isnan(), expected.isnan())
    eps = max(torch.finfo(found.dtype).eps, 2.0**-16)
    found, expected = found.double().nan_to_num(), expected.double().nan_to_num()
    bound = 2 * eps * expected.abs() + 2.0**-120
    if terms is not None:
        bound += 2.0**-18 * terms.double().abs().nan_to_num()
    assert ((found - expected).abs() <= bound).all()


@ALL
@SHAPES
@POWERS
@DTYPES
def test_gate_up_and_their_product_are_rounded_at_once(corpus, shape, power_of_two, dtype):
    gate, up = numbers(corpus, shape, dtype), numbers("outliers", shape, dtype)
    made = quantize_swiglu(gate, up, power_of_two=power_of_two, whole=True)
    assert_close(made.whole, swiglu(gate, up))
    assert_same(*made.gate, quantize(gate, (1, TILE)))
    assert_same(*made.up, quantize(up, (1, TILE)))
    assert_same(*made.h, quantize(made.whole, (1, TILE), power_of_two=power_of_two))
    assert all(scales.stride(0) == 1 for _, scales in made[:3])


@ALL
@SHAPES
@POWERS
@DTYPES
def test_the_product_is_made_again_of_codes_and_so_are_both_gradients(corpus, shape, power_of_two, dtype):
    kept = []
    for each in (corpus, "outliers"):
        tiled = quantize(numbers(each, shape, dtype), (1, TILE))
        kept.append((tiled.codes(), tiled.scales.flatten(1)))
    gate, up = (dequantize(*each, E4M3).to(dtype) for each in kept)
    d_h = numbers("normal", shape, dtype)
    for gradient in (None, d_h):
        made = requantize_swiglu(*kept, dtype, gradient, power_of_two=power_of_two, whole=True)
        assert_close(made.whole, swiglu(gate, up))
        assert_same(*made.h, quantize(made.whole, (1, TILE), power_of_two=power_of_two))
        assert (made.d_gate is None) == (made.d_up is None) == (gradient is None)
    assert_close(made.d_up, d_h * F.silu(gate))
    assert_close(made.d_gate, torch.ops.aten.silu_backward(d_h * up, gate), d_h * up)


def test_most_values_are_torchs_to_the_last_bit():
    gate, up = normal(64, 1024), normal(64, 1024, seed=1)
    found = quantize_swiglu(gate, up, whole=True).whole
    assert (found != swiglu(gate, up)).sum() < 1e-3 * found.numel()


@pytest.mark.parametrize("turn", [lambda x: x.T, lambda x: x[::2, ::3], lambda x: x[5:, 7:]])
def test_operands_may_lie_in_any_way(turn):
    gate, up, d_h = (turn(outliers(150, 290, seed=seed)) for seed in range(3))
    found, expected = (
        quantize_swiglu(*(take(each) for each in (gate, up))) for take in (lambda x: x, torch.clone)
    )
    for ours, theirs in zip(found[:3], expected[:3], strict=True):
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(ours, theirs, strict=True))
    backend = TritonFP8(QUANTIZED)
    kept = backend.quantize(gate), backend.quantize(up)  # rows and scales of a padded operand
    padded = requantize_swiglu(*kept, gate.dtype, d_h)
    copied = requantize_swiglu(*(tuple(t.clone() for t in each) for each in kept), gate.dtype, d_h.clone())
    assert torch.equal(padded.d_gate, copied.d_gate)
    assert torch.equal(padded.h[0].float(), copied.h[0].float())


def test_no_rows_are_no_codes():
    none = torch.empty(0, 200, dtype=torch.bfloat16)
    made = quantize_swiglu(none, none)
    assert made.whole is None
    assert {(codes.shape, scales.shape) for codes, scales in made[:3]} == {((0, 256), (0, 2))}
    kept = TritonFP8(QUANTIZED).quantize(none)
    again = requantize_swiglu(kept, kept, none.dtype, none)
    assert (again.h[0].shape, again.d_gate.shape, again.d_up.shape) == ((0, 256), none.shape, none.shape)


# --- layers -------------------------------------------------------------------------------------


class Apart(TritonFP8):
    """Computes SwiGLU by torch and rounds what goes in and comes out one after the other."""

    def swiglu(self, gate, up, *, whole=False):
        return None

    def recompute_swiglu(self, gate, up, dtype, *, whole=False):
        return None

    def swiglu_backward(self, gate, up, d_h, *, whole=False):
        return None

    def grouped(self, counts):
        found = super().grouped(counts)
        found.swiglu = found.swiglu_backward = lambda *args: None
        return found


def trained(layer, backend, d_y, *inputs):
    """Return the output, and the gradients of the input and of weights."""
    for _, module, found in tagged(layer):
        names = found.gemm_weights or ("weight",)
        use_gemm(module, dict.fromkeys(names, backend), Passes())
    quantize_layers(layer)
    x = inputs[0].clone().requires_grad_()
    y = layer(x, *inputs[1:])
    y.backward(d_y)
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


def assert_alike(found, expected):
    """A few values of the product may differ in their last bit, and its codes in theirs."""
    for ours, theirs in zip(found, expected, strict=True):
        error = (ours.float() - theirs.float()).norm() / theirs.float().norm().clamp_min(1e-30)
        assert error < 2e-3


def test_a_feed_forward_layer_has_the_numbers_of_one_that_does_it_step_by_step(monkeypatch):
    monkeypatch.setattr(scaled.F, "scaled_mm", checked_product)
    x, d_y, results = normal(2, 33, 200), normal(2, 33, 200, seed=1), []
    for backend in (TritonFP8(QUANTIZED), Apart(QUANTIZED)):
        torch.manual_seed(0)
        results.append(trained(SwiGLU(200, 328).bfloat16(), backend, d_y, x))
    assert_alike(*results)


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        shapes = {"gate": (3, 136, 200), "up": (3, 136, 200), "down": (3, 200, 136)}
        for name, shape in shapes.items():
            setattr(self, name, torch.nn.Parameter(normal(*shape, seed=len(name)) / 16))
        tag(self, Role.EXPERTS, split={"gate": 1, "up": 1, "down": 2}, gemm_weights=tuple(shapes))

    def forward(self, rows, counts):
        return self.ops.experts(rows, counts, self.gate, self.up, self.down)


@pytest.mark.parametrize("counts", [[40, 0, 23], [0, 0, 0]], ids=str)
def test_experts_have_the_numbers_of_those_that_do_it_step_by_step(counts):
    rows, d_y = normal(sum(counts), 200), normal(sum(counts), 200, seed=1)
    results = [
        trained(Experts(), backend, d_y, rows, torch.tensor(counts))
        for backend in (TritonFP8(QUANTIZED), Apart(QUANTIZED))
    ]
    assert_alike(*results)


def test_first_use_checks_these_kernels(monkeypatch):
    here = torch.device("cpu")
    assert all(right for _, right in first_use._swiglu(here))

    def coarser(self, *args, **options):
        h, d_gate, d_up = swiglu_backward(self, *args, **options)
        return h, d_gate * 1.02, d_up

    swiglu_backward = TritonFP8.swiglu_backward
    monkeypatch.setattr(TritonFP8, "swiglu_backward", coarser)
    assert {name for name, right in first_use._swiglu(here) if not right} == {"gradient of gate"}
