"""Products through oneDNN against float64, wherever this PyTorch has oneDNN, and who gets them."""

import math

import pytest
import torch
import torch.nn.functional as F
from nanotrain_cpu import gemm, matmul
from nanotrain_cpu.gemm import CPUGEMM, use_faster_products
from torch import nn

from nanotrain_core.layout.roles import Role, tag
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.precision.gemm import TorchGEMM, gemms_of, use_gemm


@pytest.fixture(params=["onednn", "torch"])
def library(request, monkeypatch):
    """Have every float32 product go through one of the two libraries."""
    limit = 1 if request.param == "onednn" else math.inf
    for module in (gemm, matmul):
        monkeypatch.setattr(module, "onednn_is_faster_from", lambda: limit)
    return request.param


def linear(**options):
    """Return a layer of 7 inputs and 4 outputs that a run on this processor would change, if any."""
    torch.manual_seed(0)
    part = nn.Sequential(tag(nn.Linear(7, 4, **options), Role.COLUMN))
    use_faster_products(part, Passes())
    return part[0]


def close(ours, exact, terms):
    """Hold a sum of ``terms`` float32 products of numbers near 1 against the exact one."""
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-6 * terms**0.5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("leading", [(5,), (2, 3), (1, 1), (2, 0)], ids=str)
def test_linear_layers_and_their_gradients(library, bias, leading):
    layer = linear(bias=bias)
    assert (gemms_of(layer) is not None) == (library == "onednn")
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
@pytest.mark.parametrize("into", [None, False, True])
def test_product_of_transposed_views_returned_written_and_added(library, turned, into):
    torch.manual_seed(0)
    a = torch.randn(3, 6).T if turned[0] else torch.randn(6, 3)
    b = torch.randn(5, 3).T if turned[1] else torch.randn(3, 5)
    out = None if into is None else torch.randn(6, 5)
    before = out.double() if into else 0.0
    y = matmul.matmul(a, b, out, add=bool(into))
    close(y, before + a.double() @ b.double(), 3)
    assert out is None or y.data_ptr() == out.data_ptr()


def test_broadcast_rows(library):
    a, b = torch.ones(1, 3).expand(6, 3), torch.randn(3, 5)
    close(matmul.matmul(a, b), a.double() @ b.double(), 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_stay_with_torch(library, dtype):
    assert gemms_of(linear(dtype=dtype)) is None
    a, b = torch.randn(2, 4, dtype=dtype), torch.randn(4, 3, dtype=dtype)
    assert torch.equal(matmul.matmul(a, b), a @ b)


def test_frozen_weights_get_no_gradient(library):
    layer = linear(bias=False).requires_grad_(False)
    x = torch.randn(2, 7, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    close(x.grad, layer.weight.double().sum(0).expand(2, 7), 4)


def test_a_layer_that_has_a_backend_keeps_it(monkeypatch):
    monkeypatch.setattr(gemm, "onednn_is_faster_from", lambda: 1)
    layer, backend, passes = tag(nn.Linear(7, 4), Role.ROW), TorchGEMM(), Passes()
    use_gemm(layer, {"weight": backend}, passes)
    use_faster_products(nn.Sequential(layer), passes)
    assert gemms_of(layer).backends["weight"] is backend


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("vendor_id\t: AuthenticAMD\ncpu family\t: 26\n", matmul.LARGE),
        ("vendor_id\t: AuthenticAMD\ncpu family\t: 25\n", matmul.LARGER),
        ("vendor_id\t: GenuineIntel\ncpu family\t: 26\n", math.inf),
        ("CPU implementer\t: 0x41\n", math.inf),
        ("", math.inf),
    ],
    ids=["Zen 5", "Zen 4", "Intel", "Arm", "unknown"],
)
def test_the_processors_family_alone_decides(text, limit):
    assert matmul.threshold(text) == limit


@pytest.mark.parametrize(
    ("limit", "views"), [(matmul.LARGE, True), (matmul.LARGER, False)], ids=["Zen 5", "Zen 4"]
)
def test_a_transposed_left_side_is_for_onednn_from_zen_5_on(monkeypatch, limit, views):
    monkeypatch.setattr(matmul, "onednn_is_faster_from", lambda: limit)
    left = torch.empty(512, 256)
    assert matmul._prefers_onednn(left, limit)
    assert matmul._prefers_onednn(left.T, limit) == views
    assert not matmul._prefers_onednn(left, limit - 1)
    assert not matmul._prefers_onednn(left.bfloat16(), limit)


def test_backend_multiplies_in_the_faster_library(library):
    a, b = torch.randn(6, 3), torch.randn(3, 5)
    assert torch.equal(CPUGEMM().matmul(a, b), matmul.matmul(a, b))
