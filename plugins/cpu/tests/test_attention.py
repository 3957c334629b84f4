"""Causal attention in blocks against plain PyTorch's, and in bfloat16 against the truth."""

import pytest
import torch
from nanotrain_cpu.attention import BLOCK, SHORT, attention

from nanotrain_core.models.ops import TORCH_OPS


def draw(length, heads, kv_heads, size, value_size, dtype, batch=2):
    torch.manual_seed(0)
    q = torch.randn(batch, length, heads, size, dtype=dtype)
    k = torch.randn(batch, length, kv_heads, size, dtype=dtype)
    v = torch.randn(batch, length, kv_heads, value_size, dtype=dtype)
    return [x.requires_grad_() for x in (q, k, v)]


def all_of(function, inputs, *scale):
    """Return the output and the gradients of a loss that weighs every number differently."""
    y = function(*inputs, *scale)
    weight = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape)
    return [y, *torch.autograd.grad((y.double() * weight).sum(), inputs)]


def assert_same(inputs, *scale):
    pairs = zip(all_of(attention, inputs, *scale), all_of(TORCH_OPS.attention, inputs, *scale), strict=True)
    for ours, theirs in pairs:
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("length", [1, 5, BLOCK, BLOCK + 1, 3 * BLOCK - 7, SHORT + 1])
@pytest.mark.parametrize("heads", [pytest.param((4, 4), marks=pytest.mark.full), (6, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("sizes", [(8, 8), (12, 5)], ids=str)
def test_equals_torchs(length, heads, sizes):
    assert_same(draw(length, *heads, *sizes, torch.float64))


def test_takes_a_scale():
    assert_same(draw(70, 2, 2, 8, 8, torch.float64), 0.7)


def test_no_sequences_at_all():
    assert_same(draw(70, 2, 2, 8, 8, torch.float64, batch=0))


def test_a_key_that_all_heads_share_may_be_expanded_and_so_may_gradients():
    q, k, v = draw(70, 4, 4, 8, 8, torch.float64)
    shared = k[:, :, :1].detach().requires_grad_()
    found = []
    for function in (attention, TORCH_OPS.attention):
        y = function(q, shared.expand(-1, -1, 4, -1), v)
        found.append([y, *torch.autograd.grad(y.sum(), (q, shared, v))])  # d_y has strides of 0
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_bfloat16_is_as_close_to_the_truth_as_torchs():
    inputs = draw(256, 4, 2, 32, 32, torch.bfloat16)
    truth = all_of(TORCH_OPS.attention, [x.detach().double().requires_grad_() for x in inputs])
    ours, theirs = all_of(attention, inputs), all_of(TORCH_OPS.attention, inputs)
    for mine, other, exact in zip(ours, theirs, truth, strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine - exact).norm() < 2 * (other - exact).norm()
