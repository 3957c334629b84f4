"""What changes in a layer after it was compiled: the next call has the numbers of an eager one."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from nanotrain_core.compile import function
from nanotrain_core.compile.blocks import compile_blocks
from nanotrain_core.errors import NanotrainError
from nanotrain_core.layout.roles import Role, tag
from nanotrain_core.models.activation_checkpointing import recompute_blocks
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.precision.gemm import TorchGEMM, use_gemm


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


# --- writes -----------------------------------------------------------------------------------------


class Running(TorchGEMM):
    """Keeps the largest input of a layer; ``how`` is what forward does with it."""

    def __init__(self, passes, how):
        self.passes, self.how, self.largest = passes, how, torch.zeros(())

    def forward(self, x, *weights):
        before = self.largest.clone()
        if self.passes.counted and not self.passes.in_backward and self.how != "only read":
            self.largest.copy_(torch.maximum(self.largest, x.abs().amax()))
        scale = {"read after": self.largest, "read before": before, "only read": self.largest}.get(self.how)
        x = x if scale is None else x / (1 + scale)
        return [x @ weight.T for weight in weights], (x.clone(),)

    def save_for_wgrad(self, x):
        return (x,)

    def dgrad(self, d_y, weight):
        return d_y @ weight

    def wgrad(self, d_y, kept):
        return d_y.T @ kept[0]


@pytest.mark.full_cases("only written-True", "only read-True")
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("how", ["only written", "only read", "read after", "read before"])
def test_a_layer_that_reads_what_it_writes_is_refused(how, recomputed):
    """Its wgrad had been wrong when it was recomputed: that of an input scaled by the updated maximum."""
    torch._dynamo.reset()
    layers, passes = nn.ModuleList([Layer()]), Passes()
    use_gemm(layers[0].linear, {"weight": Running(passes, how)}, passes)
    if recomputed:
        recompute_blocks(layers)
    compile_blocks([layers], "aot_eager", log=False, passes=passes)
    written = r"forward of 0 reads linear.nanotrain_gemms.backends\['weight'\].largest and writes to it"
    with pytest.raises(NanotrainError, match=written) if how.startswith("read") else nullcontext():
        layers[0](torch.ones(2, 3)).sum().backward()


def test_a_layer_that_counts_its_calls_is_refused():
    class Counting(Layer):
        def __init__(self):
            super().__init__()
            self.calls = nn.Parameter(torch.zeros(()), requires_grad=False)

        def forward(self, x):
            with torch.no_grad():
                self.calls.add_(1)
            return super().forward(x) * self.calls

    torch._dynamo.reset()
    layers = nn.ModuleList([Counting()])
    compile_blocks([layers], "aot_eager", log=False)
    with torch.no_grad():  # nothing is computed again
        assert layers[0](torch.ones(2, 3)).any()
    with pytest.raises(NanotrainError, match="the forward of 0 reads calls and writes to it"):
        layers[0](torch.ones(2, 3))
