"""Stacked experts in every way their products are made, against plain PyTorch's in float64."""

from unittest import mock

import pytest
import torch
from nanotrain_cpu import experts as module
from nanotrain_cpu import gemm
from nanotrain_cpu.experts import experts
from nanotrain_cpu.gemm import CPUGEMM
from nanotrain_cpu.grouped import Batched, OneByOne, choose_products

from nanotrain_core.models.ops import TORCH_OPS
from nanotrain_core.precision.gemm import TorchGEMM

COUNTS = (5, 0, 17, 1, 0, 3, 40, 0)
WIDTH, INNER = 30, 18

WAYS = pytest.mark.parametrize(
    ("dtype", "make", "tolerance"),
    [
        (torch.float64, lambda counts: OneByOne(counts, 1), 1e-12),
        (torch.float64, lambda counts: OneByOne(counts, 16), 1e-12),
        (torch.float32, lambda counts: OneByOne(counts, 16), 1e-5),
        (torch.bfloat16, lambda counts: OneByOne(counts, 16), 0.05),
        (torch.float64, lambda counts: Batched(counts, 1), 1e-12),
        (torch.bfloat16, lambda counts: Batched(counts, 16), 0.05),
    ],
    ids=["fp64", "fp64-filled", "fp32-filled", "bf16-filled", "fp64-batch", "bf16-batch"],
)
ROWS = pytest.mark.parametrize("counts", [COUNTS, (0,) * 7 + (9,)], ids=["several", "one"])


def draw(counts, dtype):
    """Return rows and the stacked weights gate, up and down."""
    generator = torch.Generator().manual_seed(0)
    E = len(counts)
    shapes = (sum(counts), WIDTH), (E, INNER, WIDTH), (E, INNER, WIDTH), (E, WIDTH, INNER)
    rows, *weights = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [each.to(dtype).requires_grad_() for each in (rows, *(0.3 * weight for weight in weights))]


def outputs_and_gradients(function, inputs, counts):
    rows, *weights = inputs
    y = function(rows, torch.tensor(counts), *weights)
    d_y = torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return [y.detach(), *torch.autograd.grad(y, inputs, d_y.to(y.dtype))]


def assert_close(found, expected, tolerance):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert (ours.double() - theirs).abs().max() <= tolerance * theirs.abs().max()


def chosen(where, make):
    return mock.patch.object(where, "choose_products", lambda rows, counts, weight: make(counts))


@WAYS
@ROWS
def test_values_and_gradients_are_those_of_plain_pytorch(dtype, make, tolerance, counts):
    inputs = draw(counts, dtype)
    exact = [each.detach().double().requires_grad_() for each in inputs]
    with chosen(module, make):
        found = outputs_and_gradients(experts, inputs, counts)
    assert_close(found, outputs_and_gradients(TORCH_OPS.experts, exact, counts), tolerance)


@WAYS
@ROWS
def test_the_backends_products_apart_are_those_of_plain_pytorch(dtype, make, tolerance, counts):
    rows, gate, up, _ = (each.detach() for each in draw(counts, dtype))
    d_y = torch.randn(sum(counts), INNER, generator=torch.Generator().manual_seed(3)).to(dtype)
    results = []
    with chosen(gemm, make):
        for backend, kind in ((CPUGEMM(), dtype), (TorchGEMM(), torch.float64)):
            grouped = backend.grouped(torch.tensor(counts))
            x, g, u, d = (each.to(kind) for each in (rows, gate, up, d_y))
            y, kept = grouped.forward(x, g, u)
            results.append([*y, grouped.dgrad(d, g), grouped.wgrad(d, kept)])
    assert_close(*results, tolerance)


def test_even_rows_of_16_bits_are_a_batch_and_others_are_not():
    def way(dtype, counts):
        rows = torch.empty(sum(counts), 8, dtype=dtype)
        return type(choose_products(rows, list(counts), torch.empty(2, 4, 8, dtype=dtype)))

    assert way(torch.bfloat16, (16, 15)) is Batched
    assert way(torch.bfloat16, (64, 1)) is OneByOne
    assert way(torch.bfloat16, (0, 0)) is OneByOne
    assert way(torch.float32, (16, 16)) is OneByOne


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_rows_at_all_give_no_outputs_and_gradients_of_zero(dtype):
    inputs = draw((0,) * 8, dtype)
    y, d_rows, *d_weights = outputs_and_gradients(experts, inputs, (0,) * 8)
    assert y.shape == d_rows.shape == (0, WIDTH)
    assert all(not gradient.any() for gradient in d_weights)


def test_rows_and_gradients_may_be_broadcast():
    counts = torch.tensor(COUNTS)
    rows, *weights = draw(COUNTS, torch.float64)
    results = []
    for function in (experts, TORCH_OPS.experts):
        y = function(rows[:1].expand(len(rows), -1), counts, *weights)
        results.append([y.detach(), *torch.autograd.grad(y.sum(), (rows, *weights))])
    assert_close(*results, 1e-12)


def test_frozen_rows_and_weights_get_no_gradient():
    rows, gate, up, down = draw(COUNTS, torch.float64)
    y = experts(rows.detach(), torch.tensor(COUNTS), gate, up.detach(), down)
    theirs = TORCH_OPS.experts(rows.detach(), torch.tensor(COUNTS), gate, up.detach(), down)
    pairs = (torch.autograd.grad(each.sum(), (gate, down)) for each in (y, theirs))
    assert_close(*pairs, 1e-12)
