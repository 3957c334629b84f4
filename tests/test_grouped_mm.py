"""Products of stacked weights as one kernel or operator, against one product after the other."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nanotrain_core.models.ops import grouped_linear
from nanotrain_core.moe.grouped_mm import (
    WithoutRows,
    grouped_linear_on_gpu,
    grouped_mm,
    has_one_kernel,
    zero_without_rows,
)
from nanotrain_core.precision import gemm_backend
from nanotrain_core.precision.gemm_backend import TorchGEMM

COUNTS = torch.tensor([16, 0, 32, 0])


def passed_through(multiply, dtype):
    """Return output and gradients of rows times weights, two of which have no rows."""
    numbers = torch.Generator().manual_seed(0)
    rows, weight, d_y = (
        torch.randn(*shape, generator=numbers, dtype=torch.float64).to(dtype)
        for shape in ((48, 32), (4, 16, 32), (48, 16))
    )
    rows.requires_grad_(), weight.requires_grad_()
    y = multiply(rows, weight, COUNTS)
    y.backward(d_y)
    return y.detach(), rows.grad, weight.grad


def test_the_operator_of_a_graph_is_one_product_after_the_other():
    found = passed_through(lambda x, w, counts: grouped_mm(x, w.mT, counts), torch.float64)
    for ours, plain in zip(found, passed_through(grouped_linear, torch.float64), strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-13)


def test_one_kernel_for_all_experts_is_one_product_after_the_other():
    """torch has that kernel for a CPU as well."""
    found = passed_through(grouped_linear_on_gpu, torch.bfloat16)
    for ours, plain in zip(found, passed_through(grouped_linear, torch.bfloat16), strict=True):
        torch.testing.assert_close(ours, plain, rtol=0.02, atol=0.02)
    assert not found[2][1].any()


def three(backend, x, weight, d_y):
    (y,), kept = backend.forward(x, weight)
    return y, backend.dgrad(d_y, weight), backend.wgrad(d_y, kept)


def test_a_backend_that_has_one_kernel_makes_each_gemm_with_it_and_never_asks_for_the_counts(monkeypatch):
    """As on a GPU, where asking makes the host wait."""
    numbers = torch.Generator().manual_seed(0)
    x, weight, d_y = (
        torch.randn(*shape, generator=numbers).bfloat16() for shape in ((48, 32), (4, 16, 32), (48, 16))
    )
    expected = three(TorchGEMM().grouped(COUNTS), x, weight, d_y)
    monkeypatch.setattr(gemm_backend, "has_one_kernel", lambda rows, *sizes: True)
    backend = TorchGEMM().grouped(COUNTS)
    for ours, plain in zip(three(backend, x, weight, d_y), expected, strict=True):
        torch.testing.assert_close(ours, plain, rtol=0.02, atol=0.02)
    assert "counts" not in vars(backend)


@pytest.mark.parametrize(
    ("device", "dtype", "rows", "widths", "expected"),
    [
        ("cuda", torch.bfloat16, 48, (32, 16), True),
        ("cuda", torch.bfloat16, 48, (32, 12), False),
        ("cuda", torch.bfloat16, 0, (32, 16), False),
        ("cuda", torch.float32, 48, (32, 16), False),
        ("cpu", torch.bfloat16, 48, (32, 16), False),
    ],
)
def test_one_kernel_is_for_bfloat16_rows_of_whole_16_bytes_on_a_gpu(device, dtype, rows, widths, expected):
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert has_one_kernel(torch.empty(rows, widths[0], dtype=dtype, device=device), *widths) is expected


@pytest.mark.parametrize("left", [float("nan"), 7.0])
def test_whatever_a_kernel_leaves_of_an_expert_without_rows_its_gradient_is_zero(left):
    weight = torch.ones(4, 2, 2, requires_grad=True)
    used = WithoutRows.apply(weight, COUNTS, zero_without_rows)
    gradient = torch.ones(4, 2, 2)
    gradient[COUNTS == 0] = left
    used.backward(gradient)
    assert torch.equal(weight.grad.sum((1, 2)), torch.tensor([4.0, 0.0, 4.0, 0.0]))
