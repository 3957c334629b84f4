"""What is frozen costs no gradient: none is computed, and no input is kept for it."""

import pytest
import torch
from torch import nn

from nanotrain_core.layout.roles import Role, tag
from nanotrain_core.models.cross_entropy import linear_cross_entropy, matmul
from nanotrain_core.moe.experts import Experts
from nanotrain_core.moe.routing import Routing
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.precision.gemm import TorchGEMM, gemm_parameters, use_gemm


def kept_bytes(compute):
    """Return the bytes of the distinct tensors that a forward pass keeps, and its output."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = compute()
    return sum(kept.values()), output


@pytest.mark.parametrize("trained", [True, False])
def test_a_linear_layer_with_a_gemm_backend_keeps_its_input_only_if_its_weight_is_trained(trained):
    layer = tag(nn.Linear(8, 4, bias=False).requires_grad_(trained), Role.COLUMN)
    use_gemm(layer, {"weight": TorchGEMM()}, Passes())
    x = torch.randn(100, 8, requires_grad=True)
    kept, y = kept_bytes(lambda: layer(x))
    assert kept == layer.weight.nbytes + trained * x.nbytes
    y.sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.detach().sum(0).expand(100, 8))
    assert (layer.weight.grad is not None) == trained


def test_frozen_experts_with_gemm_backends_do_not_keep_their_rows():
    torch.manual_seed(1)
    found = {}
    for trained in (True, False):
        experts = Experts(2, 8, 6)
        for parameter in experts.parameters():
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(2))
        experts.requires_grad_(trained)
        use_gemm(experts, dict.fromkeys(gemm_parameters(experts), TorchGEMM()), Passes())
        x = torch.ones(1, 10, 8, requires_grad=True)
        routing = Routing(torch.zeros(1, 10, 1, dtype=torch.long), torch.ones(1, 10, 1), {})
        kept, y = kept_bytes(lambda: experts(x, routing))  # noqa: B023
        y.sum().backward()
        found[trained] = kept, x.grad
        assert all((each.grad is not None) == trained for each in experts.parameters())
    assert found[True][0] - found[False][0] >= 10 * 8 * 4
    torch.testing.assert_close(found[False][1], found[True][1])


@pytest.mark.parametrize("trained", [True, False])
def test_the_loss_computes_the_gradient_of_a_head_only_if_it_is_trained(trained):
    """Its float32 gradient is the largest of a model, and its product a third of the head's."""
    products = []

    def counted(left, right, total=None):
        products.append(total)
        return matmul(left, right, total)

    hidden, target = torch.randn(6, 8, requires_grad=True), torch.arange(6)
    weight = torch.randn(16, 8, requires_grad=trained)
    kept, loss = kept_bytes(lambda: linear_cross_entropy(hidden, weight, target, matmul=counted))
    loss.backward()
    assert len(products) == 2 + trained
    assert kept == hidden.nbytes + trained * weight.nbytes
    expected = torch.nn.functional.cross_entropy(hidden @ weight.T, target, reduction="sum")
    (wanted,) = torch.autograd.grad(expected, hidden)
    torch.testing.assert_close(hidden.grad, wanted)
