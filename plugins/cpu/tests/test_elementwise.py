"""RMSNorm against plain PyTorch's: the harness calls it with few numbers, which are left to PyTorch."""

import pytest
import torch
from nanotrain_cpu import elementwise

from nanotrain_core.models.ops import TORCH_OPS
from nanotrain_core.testing.checks.kernels import assert_near, results
from nanotrain_core.testing.kernel_inputs import Sample, samples


def norm(function, leaves):
    return function(leaves["x"], leaves["weight"], 1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_sums_of_the_backward_pass_are_right_for_few_numbers_too(dtype, monkeypatch):
    monkeypatch.setattr(elementwise, "FEW", 0)
    generator = torch.Generator().manual_seed(0)
    leaves = {"x": (40, 33, 27), "weight": (27,)}
    many = {name: torch.randn(shape, generator=generator) for name, shape in leaves.items()}
    for sample in [*samples("rms_norm"), Sample("many numbers", many, norm).cast(torch.bfloat16)]:
        truth, plain = (results(TORCH_OPS.rms_norm, sample, used) for used in (torch.float64, dtype))
        assert_near(results(elementwise.rms_norm, sample, dtype), plain, truth, sample.name)


def made_by(rows):
    x = torch.ones(rows, 32, requires_grad=True)
    return type(elementwise.rms_norm(x, torch.ones(32), 1e-5).grad_fn).__name__


def test_many_numbers_are_computed_here_and_few_by_pytorch():
    assert made_by(2**10) == "_RMSNormBackward"
    assert made_by(2**10 - 1) != "_RMSNormBackward"


@pytest.mark.parametrize("wanted", ["x", "weight"])
def test_a_gradient_may_be_wanted_of_one_input_alone(wanted, monkeypatch):
    monkeypatch.setattr(elementwise, "FEW", 0)
    (ordinary, *_) = samples("rms_norm")
    found = results(elementwise.rms_norm, ordinary, torch.float64, {wanted})
    plain = results(TORCH_OPS.rms_norm, ordinary, torch.float64, {wanted})
    assert_near(found, plain, plain, wanted)
