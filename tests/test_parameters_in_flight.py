"""Weights may travel during the next forward: the model waits in time, and so does who reads them."""

import pytest
import torch
from torch import nn

from nanotrain_core.contracts import Optimizer
from nanotrain_core.layout.parameters_in_flight import install_ready_hooks, readers
from nanotrain_core.layout.roles import Role, tag
from nanotrain_core.testing.components.late_weights import LateWeights


class Untagged(nn.Module):
    """Each layer multiplies by its own weight and by the next one's."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(3))

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = layer(x) @ self.layers[(number + 1) % 3].weight
        return x


class Tagged(nn.Module):
    """An embedding that is lent to the head, two layers with a tagged linear each, a norm without a tag."""

    def __init__(self):
        super().__init__()
        self.embed = tag(nn.Embedding(4, 3), Role.VOCAB)
        self.layers = nn.ModuleList(
            tag(nn.Sequential(tag(nn.Linear(3, 3), Role.COLUMN)), Role.BLOCK) for _ in range(2)
        )
        self.norm = nn.LayerNorm(3)
        self.head = tag(nn.Linear(3, 3), Role.HEAD)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) @ self.embed.weight.T


INPUTS = {Untagged: torch.randn(2, 3), Tagged: torch.tensor([0, 3])}


@pytest.mark.parametrize("model", [Untagged, Tagged])
def test_a_forward_pass_never_sees_a_weight_that_has_not_arrived(model):
    torch.manual_seed(0)
    part = model()
    expected = part(INPUTS[model])
    late = LateWeights([part])
    install_ready_hooks([part], late)
    for _ in range(2):
        late.send()
        assert torch.equal(part(INPUTS[model]), expected)
        assert not late.travelling


def test_layers_and_head_wait_by_themselves_and_the_rest_with_the_part():
    part = Tagged()
    assert list(readers(part)) == [*part.layers, part.head]
    late, arrived = LateWeights([part]), []
    install_ready_hooks([part], late)
    part.layers[0].register_forward_pre_hook(lambda *_: arrived.append(set(late.travelling)))
    late.send()
    part(INPUTS[Tagged])
    assert arrived == [{*part.layers[1].parameters(), *part.head.parameters()}]


def test_everything_can_be_waited_for_at_once():
    part = Tagged()
    late = LateWeights([part])
    ready = install_ready_hooks([part], late)
    late.send()
    ready()
    assert not late.travelling
    assert all(torch.isfinite(p).all() for p in part.parameters())


def test_an_optimizer_that_is_never_late_adds_no_hook():
    part = Tagged()
    install_ready_hooks([part], Optimizer())()
    assert not any(module._forward_pre_hooks for module in part.modules())
