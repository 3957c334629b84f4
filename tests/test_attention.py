"""Causal attention on a CPU against torch's, and in bfloat16 against the truth."""

import pytest
import torch
import torch.nn.functional as F
from nanotrain_core.models.attention import BLOCK, SHORT, causal_attention


def draw(length, heads, kv_heads, size, value_size, dtype):
    torch.manual_seed(0)
    q = torch.randn(2, length, heads, size, dtype=dtype)
    k = torch.randn(2, length, kv_heads, size, dtype=dtype)
    v = torch.randn(2, length, kv_heads, value_size, dtype=dtype)
    return [x.requires_grad_() for x in (q, k, v)]


def torchs(q, k, v, scale=None):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True).transpose(
        1, 2
    )


def all_of(attention, inputs, **options):
    """Return the output and the gradients of a loss that weighs every number differently."""
    y = attention(*inputs, **options)
    weight = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape)
    return [y, *torch.autograd.grad((y.double() * weight).sum(), inputs)]


@pytest.mark.parametrize("length", [1, 5, BLOCK, BLOCK + 1, 3 * BLOCK - 7, SHORT + 1])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("sizes", [(8, 8), (12, 5)], ids=str)
def test_equals_torchs(length, heads, sizes):
    inputs = draw(length, *heads, *sizes, torch.float64)
    for ours, theirs in zip(all_of(causal_attention, inputs), all_of(torchs, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_takes_a_scale():
    inputs = draw(70, 2, 2, 8, 8, torch.float64)
    for ours, theirs in zip(
        all_of(causal_attention, inputs, scale=0.7), all_of(torchs, inputs, scale=0.7), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_bfloat16_is_as_close_to_the_truth_as_torchs():
    inputs = draw(256, 4, 2, 32, 32, torch.bfloat16)
    truth = all_of(torchs, [x.detach().double().requires_grad_() for x in inputs])
    ours, theirs = all_of(causal_attention, inputs), all_of(torchs, inputs)
    for mine, other, exact in zip(ours, theirs, truth, strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine - exact).norm() < 2 * (other - exact).norm()
