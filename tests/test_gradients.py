"""Gradients of low-precision parameters are added in the run's dtype: of all uses and microbatches."""

import pytest
import torch
from torch import nn

from nanotrain_core.layout.gradients import LocalGradients
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import place, placed_parameters


class Times(torch.autograd.Function):
    """The parameter, whose gradient is float32 as a low-bit product's is."""

    @staticmethod
    def forward(ctx, weight, gradient):
        ctx.gradient = gradient
        return weight.clone()

    @staticmethod
    def backward(ctx, d_y):
        return ctx.gradient * d_y.float(), None


def attached(dtype, module=None):
    module = module or nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    mesh = Mesh(Layout({"dense": View(("dp",), (1,))}))
    gradients = LocalGradients()
    gradients.attach(placed_parameters([module], place([module], mesh.layout)), mesh, dtype)
    return module, gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_uses_and_many_microbatches_of_a_weight_add_up(dtype):
    """bfloat16 would not see 1 beside 256, whichever comes first."""
    module, gradients = attached(dtype)
    for factor in (256.0, 1.0, 1.0):
        (module.weight * factor + module.weight).sum().backward()
    found = gradients.gradient(module.weight)
    assert found.dtype == dtype
    assert found.item() == 256 + 1 + 1 + 3


@pytest.mark.parametrize("wide_first", [True, False])
def test_a_gradient_that_is_wider_than_its_weight_is_not_rounded(wide_first):
    module, gradients = attached(torch.float32)
    exact = torch.tensor([[1 + 2.0**-12]])
    uses = [lambda: Times.apply(module.weight, exact), lambda: module.weight * 1.0]
    first, second = uses if wide_first else reversed(uses)
    (first() + second()).sum().backward()
    assert gradients.gradient(module.weight).item() == 2 + 2.0**-12


def test_without_a_wider_dtype_a_gradient_has_its_weights_again():
    """A script may adapt a model that was trained with float32 sums before."""
    module, _ = attached(torch.float32)
    module.weight.sum().backward()
    module, gradients = attached(None, module)
    assert module.weight.grad is None
    Times.apply(module.weight, torch.tensor([[1 + 2.0**-12]])).sum().backward()
    assert gradients.gradient(module.weight).dtype == torch.bfloat16
    assert gradients.gradient(module.weight).item() == 1
