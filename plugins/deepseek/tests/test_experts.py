"""Stacked experts against one SwiGLU after the other, in every way their products are made."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from nanotrain_deepseek import experts as module
from nanotrain_deepseek.config import DeepSeekConfig
from nanotrain_deepseek.experts import Experts
from nanotrain_deepseek.samples import V3
from torch import nn

from nanotrain_core.moe.grouped_mm import Batched, Grouped, OneByOne, choose_products
from nanotrain_core.moe.routing import Routing
from nanotrain_core.pipeline import weight_gradients
from nanotrain_core.pipeline.weight_gradients import Postponed

COUNTS = (5, 0, 17, 1, 0, 3, 40, 0)
WEIGHTS = ("gate", "up", "down")


def experts_of(dtype, *, width=32, inner=16):
    torch.manual_seed(0)
    experts = Experts(DeepSeekConfig(**V3 | {"width": width, "expert_ffn": inner}))
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


@pytest.mark.parametrize(
    ("dtype", "make", "tolerance"),
    [
        (torch.float64, lambda counts: OneByOne(counts, 1), 1e-12),
        (torch.float64, lambda counts: OneByOne(counts, 16), 1e-12),
        (torch.float32, lambda counts: OneByOne(counts, 16), 1e-5),
        (torch.bfloat16, lambda counts: OneByOne(counts, 16), 0.05),
        (torch.float64, lambda counts: Batched(counts, 1), 1e-12),
        (torch.bfloat16, lambda counts: Batched(counts, 16), 0.05),
        (torch.bfloat16, lambda counts: Grouped(torch.tensor(counts)), 0.05),
    ],
    ids=["fp64", "fp64-filled", "fp32-filled", "bf16-filled", "fp64-batch", "bf16-batch", "bf16-grouped"],
)
@pytest.mark.parametrize("counts", [COUNTS, (0,) * 7 + (9,)], ids=["several", "one"])
def test_products_and_gradients_are_those_of_a_loop(dtype, make, tolerance, counts):
    experts = experts_of(dtype)
    rows = torch.randn(sum(counts), 32).to(dtype)
    exact = experts_of(torch.float64)
    for name in WEIGHTS:
        getattr(exact, name).data = getattr(experts, name).data.double()
    expected = outputs_and_gradients(exact, lambda x: reference(exact, x, counts), rows.double())
    with mock.patch.object(module, "choose_products", lambda rows, counts, weight: make(counts.tolist())):
        found = outputs_and_gradients(experts, lambda x: experts.compute(x, torch.tensor(counts)), rows)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.double() - theirs).abs().max() <= tolerance * theirs.abs().max()


@pytest.mark.parametrize(("device", "way"), [("cpu", Batched), ("meta", OneByOne)])
def test_even_rows_are_a_batch_only_where_its_places_are(device, way):
    """On a device in float16 too, or in bfloat16 where sizes are not aligned."""
    rows, weight = (torch.empty(s, dtype=torch.float16, device=device) for s in ((32, 8), (2, 4, 8)))
    assert type(choose_products(rows, torch.tensor([16, 16]), weight)) is way


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


def test_weight_gradients_can_be_put_off():
    experts, rows, counts = experts_of(torch.float64), torch.randn(66, 32).double(), torch.tensor(COUNTS)
    *_, gate, up, down = outputs_and_gradients(experts, lambda x: experts.compute(x, counts), rows)
    later, inputs = Postponed(), rows.clone().requires_grad_()
    y = experts.compute(inputs, counts)
    generator = torch.Generator().manual_seed(3)
    with weight_gradients.postpone(later):
        y.backward(torch.randn(y.shape, generator=generator).to(y.dtype))
    assert inputs.grad is not None
    assert experts.gate.grad is None
    later.compute()
    for found, expected in zip((experts.gate, experts.up, experts.down), (gate, up, down), strict=True):
        assert torch.equal(found.grad, expected)


def backward_of(experts, counts, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(sum(counts), 32, generator=generator).to(experts.gate.dtype).requires_grad_()
    y = experts.compute(rows, torch.tensor(counts))
    y.backward(torch.randn(y.shape, generator=generator).to(y.dtype))


@pytest.mark.parametrize(
    ("dtype", "make", "tolerance"),
    [
        (torch.float64, lambda counts: OneByOne(counts, 1), 1e-12),
        (torch.bfloat16, lambda counts: Batched(counts, 16), 0.02),
        (torch.bfloat16, lambda counts: Grouped(torch.tensor(counts)), 0.02),
    ],
    ids=["fp64", "bf16-batch", "bf16-grouped"],
)
def test_a_later_microbatch_adds_to_the_gradients_that_are_there(dtype, make, tolerance):
    experts, other, told = experts_of(dtype), experts_of(dtype), []
    experts.up.register_post_accumulate_grad_hook(lambda weight: told.append(weight.grad.clone()))
    with mock.patch.object(module, "choose_products", lambda rows, counts, weight: make(counts.tolist())):
        for counts in (COUNTS, COUNTS[::-1]):
            backward_of(other, counts, counts[0])
            with weight_gradients.add_in_place():
                backward_of(experts, counts, counts[0])
    for name in WEIGHTS:
        ours, theirs = (getattr(each, name).grad.double() for each in (experts, other))
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()
    assert len(told) == 2
    assert torch.equal(told[1], experts.up.grad)


def test_gradients_that_a_hook_looks_at_are_not_added_behind_its_back():
    experts, seen = experts_of(torch.float64), []
    experts.gate.register_hook(lambda gradient: seen.append(gradient.clone()) or 2 * gradient)
    with weight_gradients.add_in_place():
        backward_of(experts, COUNTS, 0)
        backward_of(experts, COUNTS, 1)
    assert torch.allclose(experts.gate.grad, 2 * (seen[0] + seen[1]), atol=1e-12)


def test_gradients_that_somebody_asks_for_leave_those_that_are_there_alone():
    experts, rows = experts_of(torch.float64), torch.randn(66, 32).double()
    backward_of(experts, COUNTS, 0)
    before = experts.down.grad.clone()
    (asked,) = torch.autograd.grad(experts.compute(rows, torch.tensor(COUNTS)).sum(), experts.down)
    assert asked.abs().sum() > 0
    assert torch.equal(experts.down.grad, before)
