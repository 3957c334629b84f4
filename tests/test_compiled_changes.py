"""What changes in a layer after it was compiled: the next call has the numbers of an eager one."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from nanotrain_core.compile import function
from nanotrain_core.compile.blocks import compile_blocks
from nanotrain_core.errors import NanotrainError
from nanotrain_core.layout.roles import Role, tag


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = tag(nn.Linear(3, 3), Role.COLUMN)
        self.factor = 1
        tag(self, Role.BLOCK)

    def forward(self, x):
        return self.linear(x) * self.factor


def compiled(count=1, backend="aot_eager"):
    torch._dynamo.reset()
    counters.clear()
    layers = nn.ModuleList([Layer() for _ in range(count)])
    compile_blocks([layers], backend, log=False)
    return layers


def same_as_eager(layer, x=None):
    """Call the layer, and compare with what its class computes eagerly."""
    x = torch.randn(2, 3) if x is None else x
    torch.testing.assert_close(layer(x), type(layer).forward(layer, x), rtol=0, atol=0)


def graphs():
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("most", [2, pytest.param(10, id="more than torch's own limit")])
def test_an_attribute_that_changes_in_each_step_ends_in_eager_calls(most):
    (layer,) = compiled(backend="eager")
    with mock.patch.object(function, "MOST_GRAPHS", most):
        for step in range(most + 3):
            layer.factor = step
            same_as_eager(layer)
    assert graphs() == most


def test_a_limit_of_torch_itself_ends_in_eager_calls():
    (layer,) = compiled(backend="eager")
    with (
        mock.patch.object(function, "MOST_GRAPHS", 2),
        mock.patch.object(function, "_graphs_made", return_value=0),  # they are counted by torch alone
    ):
        for step in range(5):
            layer.factor = step
            same_as_eager(layer)
    assert graphs() == 2


def test_a_compiler_that_is_switched_off_leaves_eager_calls():
    (layer,) = compiled()
    with torch.compiler.set_stance("force_eager"):
        for _ in range(2):
            same_as_eager(layer)
    assert graphs() == 0


# --- hooks ------------------------------------------------------------------------------------------


def test_a_hook_on_a_module_inside_a_layer_is_traced_and_given_up():
    """Layers share a graph, so it must be traced for the layer that has it, before or after a first call."""
    layers = compiled(3)
    layers[1].linear.register_forward_hook(lambda module, args, y: 2 * y)
    for layer in layers:
        same_as_eager(layer)
    last = layers[2].linear.register_forward_pre_hook(lambda module, args: (3 * args[0],))
    for layer in layers:
        same_as_eager(layer)
    assert graphs() == 3
    last.remove()
    same_as_eager(layers[2])
    assert graphs() == 3


def test_a_hook_of_gradients_that_torch_cannot_trace_is_refused():
    (layer,) = compiled()
    x = torch.randn(2, 3, requires_grad=True)
    same_as_eager(layer, x)
    layer.linear.register_full_backward_hook(lambda module, d_in, d_out: (2 * d_in[0],))
    with pytest.raises(NanotrainError, match=r"run.compile: 0 cannot be compiled .*run.compile = false"):
        layer(x)
