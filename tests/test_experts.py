"""Stacked experts against one SwiGLU after the other, in every way their products are made."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nanotrain_core.moe.experts import Experts
from nanotrain_core.moe.routing import Routing, sort_by_expert
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.pipeline.weight_gradients import DeferredGradients
from nanotrain_core.precision.gemm import TorchGEMM, use_gemm

COUNTS = (5, 0, 17, 1, 0, 3, 40, 0)
WEIGHTS = ("gate", "up", "down")


def experts_of(dtype, *, width=32, inner=16):
    torch.manual_seed(0)
    experts = Experts(8, width, inner)
    for name in WEIGHTS:
        shape = getattr(experts, name).shape
        setattr(experts, name, nn.Parameter((0.3 * torch.randn(shape)).to(dtype)))
    return experts


def reference(experts, rows, counts):
    """Return outputs, expert by expert, from plain operations."""
    weights = zip(experts.gate, experts.up, experts.down, strict=True)
    pieces = zip(rows.split(list(counts)), weights, strict=True)
    return torch.cat([(F.silu(x @ g.T) * (x @ u.T)) @ d.T for x, (g, u, d) in pieces])


def outputs_and_gradients(experts, function, rows):
    rows = rows.detach().requires_grad_()
    y = function(rows)
    generator = torch.Generator().manual_seed(3)
    y.backward(torch.randn(y.shape, generator=generator).to(y.dtype))
    found = [y.detach(), rows.grad, *(getattr(experts, name).grad for name in WEIGHTS)]
    experts.zero_grad()
    return found


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("counts", [COUNTS, (0,) * 7 + (9,)], ids=["several", "one"])
@pytest.mark.parametrize("apart", [False, True], ids=["autograd", "gemms"])
def test_products_and_gradients_are_those_of_a_loop(dtype, tolerance, counts, apart):
    experts = experts_of(dtype)
    if apart:
        use_gemm(experts, dict.fromkeys(WEIGHTS, TorchGEMM()), Passes())
    rows = torch.randn(sum(counts), 32).to(dtype)
    exact = experts_of(torch.float64)
    for name in WEIGHTS:
        getattr(exact, name).data = getattr(experts, name).data.double()
    expected = outputs_and_gradients(exact, lambda x: reference(exact, x, counts), rows.double())
    found = outputs_and_gradients(experts, lambda x: experts.compute(x, torch.tensor(counts)), rows)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.double() - theirs).abs().max() <= tolerance * theirs.abs().max()


def test_no_rows_at_all_give_no_outputs_and_gradients_of_zero():
    experts = experts_of(torch.float32)
    rows = torch.empty(0, 32, requires_grad=True)
    experts.compute(rows, torch.zeros(8, dtype=torch.int64)).sum().backward()
    assert rows.grad.shape == (0, 32)
    assert all(getattr(experts, name).grad.abs().sum() == 0 for name in WEIGHTS)


def test_halves_of_every_expert_add_up_to_the_whole():
    experts, rows, counts = experts_of(torch.float64), torch.randn(66, 32).double(), torch.tensor(COUNTS)
    whole, total = experts.compute(rows, counts), 0.0
    for half in (slice(0, 8), slice(8, 16)):
        part = experts_of(torch.float64)
        part.gate, part.up = nn.Parameter(experts.gate[:, half]), nn.Parameter(experts.up[:, half])
        part.down = nn.Parameter(experts.down[:, :, half])
        total = total + part.compute(rows, counts)
    assert torch.allclose(total, whole, atol=1e-12)


def test_layer_weighs_and_adds_the_chosen_experts_of_each_token():
    experts, x = experts_of(torch.float64), torch.randn(2, 5, 32).double()
    chosen = torch.stack([torch.randperm(8)[:3] for _ in range(10)]).view(2, 5, 3)
    weights = torch.rand(2, 5, 3).double()
    y = experts(x, Routing(chosen, weights))
    for b, s in torch.cartesian_prod(torch.arange(2), torch.arange(5)).tolist():
        expected = torch.zeros(32, dtype=torch.float64)
        for e, w in zip(chosen[b, s].tolist(), weights[b, s], strict=True):
            hidden = F.silu(experts.gate[e] @ x[b, s]) * (experts.up[e] @ x[b, s])
            expected += w * (experts.down[e] @ hidden)
        assert torch.allclose(y[b, s], expected, atol=1e-12)


def test_weight_gradients_can_be_deferred():
    experts, rows, counts = experts_of(torch.float64), torch.randn(66, 32).double(), torch.tensor(COUNTS)
    passes = Passes()
    use_gemm(experts, dict.fromkeys(WEIGHTS, TorchGEMM()), passes)
    *_, gate, up, down = outputs_and_gradients(experts, lambda x: experts.compute(x, counts), rows)
    later, inputs = DeferredGradients(), rows.clone().requires_grad_()
    y = experts.compute(inputs, counts)
    generator = torch.Generator().manual_seed(3)
    with passes.backward(later):
        y.backward(torch.randn(y.shape, generator=generator).to(y.dtype))
    assert inputs.grad is not None
    assert experts.gate.grad is None
    later.compute()
    for found, expected in zip((experts.gate, experts.up, experts.down), (gate, up, down), strict=True):
        assert torch.equal(found.grad, expected)


class SortedKeys(TorchDispatchMode):
    """Records the dtypes of what is sorted."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if "sort" in str(operator):
            self.dtypes.append(args[0].dtype)
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("count", "dtype"), [(256, torch.int16), (2**15, torch.int16), (2**15 + 1, torch.int64)]
)
def test_choices_are_sorted_stably_by_keys_of_few_bytes(count, dtype):
    """A radix sort makes a pass for each byte; with more experts than two signed bytes tell apart, eight."""
    chosen = torch.tensor([[count - 1, 3], [0, count - 1], [3, 1]])
    with SortedKeys() as keys:
        order, rows = sort_by_expert(chosen, count)
    assert order.tolist() == [2, 5, 1, 4, 0, 3]
    assert rows[[0, 1, 3, count - 1]].tolist() == [1, 1, 2, 2]
    assert keys.dtypes == [dtype]
