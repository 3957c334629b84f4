"""Products through oneDNN against PyTorch's own in float64, wherever this PyTorch has oneDNN."""

import math

import pytest
import torch
import torch.nn.functional as F
from nanotrain_core.models.linear import Linear, matmul

from nanotrain_core.models import linear


@pytest.fixture(params=["onednn", "torch"])
def library(request, monkeypatch):
    """Have every float32 product go through one of the two libraries."""
    monkeypatch.setattr(linear, "onednn_is_faster_from", lambda: 1 if request.param == "onednn" else math.inf)
    return request.param


def close(ours, exact, terms):
    """Hold a sum of ``terms`` float32 products of numbers near 1 against the exact one."""
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-6 * terms**0.5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("leading", [(5,), (2, 3), (1, 1)], ids=str)
def test_linear_and_its_gradients(library, bias, leading):
    torch.manual_seed(0)
    layer = Linear(7, 4, bias=bias)
    x, d_y = torch.randn(*leading, 7, requires_grad=True), torch.randn(*leading, 4)
    inputs = [x, *layer.parameters()]
    exact = [each.detach().double().requires_grad_() for each in inputs]

    y, y_exact = layer(x), F.linear(*exact)
    close(y, y_exact, 7)
    ours, theirs = torch.autograd.grad(y, inputs, d_y), torch.autograd.grad(y_exact, exact, d_y.double())
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.shape == other.shape
        close(mine, other, 7)


@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)], ids=str)
def test_product_of_transposed_views(library, turned):
    torch.manual_seed(0)
    a = torch.randn(3, 6).T if turned[0] else torch.randn(6, 3)
    b = torch.randn(5, 3).T if turned[1] else torch.randn(3, 5)
    close(matmul(a, b), a.double() @ b.double(), 3)


def test_frozen_weights_get_no_gradient(library):
    layer = Linear(4, 4, bias=False).requires_grad_(False)
    x = torch.randn(2, 4, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    close(x.grad, layer.weight.double().sum(0).expand(2, 4), 4)


def test_other_dtypes_stay_with_torch(library, monkeypatch):
    monkeypatch.setattr(linear, "in_use", lambda: False)  # a test before this one may have postponed
    for dtype in (torch.float64, torch.bfloat16):
        layer, x = Linear(4, 3, dtype=dtype), torch.randn(2, 4, dtype=dtype)
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


def test_an_empty_batch(library):
    layer, x = Linear(4, 3), torch.randn(2, 0, 4, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == (2, 0, 3)
    assert x.grad.shape == x.shape
    assert not layer.weight.grad.any()
