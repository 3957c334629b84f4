"""Stacks of matrices are orthogonalized as torch.optim.Muon does each of them."""

import pytest
import torch
from nanotrain_muon.newton_schulz import flops, orthogonalize, scale_of
from torch.optim import _muon as torchs
from torch.utils.flop_counter import FlopCounterMode


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32), (1, 16), (16, 1)])
def test_a_stack_is_orthogonalized_as_torch_does_each_matrix(shape):
    torch.manual_seed(0)
    stack = torch.randn(3, *shape, dtype=torch.bfloat16)
    wide = stack if shape[0] <= shape[1] else stack.mT
    found = orthogonalize(wide.clone(memory_format=torch.contiguous_format), 5)
    coefficients, eps = (torchs.DEFAULT_A, torchs.DEFAULT_B, torchs.DEFAULT_C), torchs.EPS
    expected = torch.stack([torchs._zeropower_via_newtonschulz(m, coefficients, 5, eps) for m in stack])
    found = found if shape[0] <= shape[1] else found.mT
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)


def test_singular_values_come_near_one_and_vectors_stay():
    torch.manual_seed(0)
    x = torch.randn(1, 20, 50, dtype=torch.float64)
    u, s, v = torch.linalg.svd(x[0], full_matrices=False)
    found = orthogonalize(x.clone(), 5)[0]
    values = (u.T @ found @ v.T).diagonal()
    torch.testing.assert_close(u @ values.diag() @ v, found)
    assert 0.65 < values.min() <= values.max() < 1.25
    assert s.max() / s.min() > 3


def test_matrices_of_a_stack_do_not_meet():
    torch.manual_seed(0)
    stack = torch.randn(3, 8, 12, dtype=torch.float64)
    alone = torch.stack([orthogonalize(each[None].clone(), 5)[0] for each in stack])
    torch.testing.assert_close(orthogonalize(stack.clone(), 5), alone, atol=1e-13, rtol=0)


def test_a_matrix_of_zeros_stays_zero():
    assert orthogonalize(torch.zeros(2, 4, 6), 5).count_nonzero() == 0


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_scales_are_those_of_torch(shape):
    for ours, theirs in (("original", "original"), ("moonlight", "match_rms_adamw")):
        assert scale_of(ours, *shape) == pytest.approx(torchs._adjust_lr(1.0, theirs, torch.Size(shape)))


@pytest.mark.full  # torch's counter imports much
def test_flops_are_those_that_are_computed():
    with FlopCounterMode(display=False) as counter:
        orthogonalize(torch.randn(1, 24, 40), 3)
    assert counter.get_total_flops() == 3 * flops(24, 40) == 3 * flops(40, 24)
