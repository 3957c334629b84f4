"""Gradients of low-precision parameters are added in the run's dtype: of all uses and microbatches."""

import pytest
import torch
from nanotrain_ddp import DataParallelConfig
from nanotrain_ddp.data_parallel import DataParallel
from nanotrain_zero12 import ShardConfig
from nanotrain_zero12.parallel_component import Sharded
from torch import distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from nanotrain_core.errors import NanotrainError
from nanotrain_core.layout import gradients as layer
from nanotrain_core.layout.gradients import AllReduceGradients, LocalGradients
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import place, placed_parameters
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import train


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


@pytest.mark.parametrize(
    ("make", "hooks"),
    [
        (LocalGradients, 1),
        (AllReduceGradients, 0),
        (lambda: DataParallel(DataParallelConfig(overlap=True)), 1),
        (lambda: DataParallel(DataParallelConfig(overlap=False)), 0),
    ],
    ids=["local", "all_reduce", "ddp", "ddp without overlap"],
)
def test_a_parameter_has_a_python_hook_only_where_somebody_listens(make, hooks, monkeypatch):
    """It is called for each parameter in each microbatch."""
    watched, register = [], layer.register_gradient_hook
    monkeypatch.setattr(
        layer, "register_gradient_hook", lambda *each: (watched.append(each[0]), register(*each))
    )
    module, gradients = nn.Linear(2, 3), make()
    mesh = Mesh(Layout({"dense": View(("dp",), (1,))}))
    gradients.attach(placed_parameters([module], place([module], mesh.layout)), mesh, torch.float32)
    assert watched == [*module.parameters()] * hooks
    for _ in range(2):
        module(torch.ones(1, 2)).sum().backward()
    gradients.finish()
    assert gradients.gradient(module.weight).tolist() == [[2.0, 2.0]] * 3


def without_overlap(case):
    return [
        train(case, {"parallel": [{"use": "ddp", "overlap": overlap}]}).weights for overlap in (True, False)
    ]


def test_without_overlap_gradients_are_summed_to_the_same_bits():
    for overlapped, after in run_ranks(
        without_overlap, 2, Case("schedule", use="accumulate", topology={"dp": 2})
    ):
        assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(overlapped, after, strict=True))


SYNCS = {"ddp": (DataParallel, DataParallelConfig), "zero12": (Sharded, ShardConfig)}


def sum_of_shared_layer(name, config, reentrant):
    """Return the elements on this rank of a layer's gradient, or the error; each call is checkpointed."""
    component, config_class = SYNCS[name]
    sync, mesh = (
        component(config_class(**config)),
        Mesh(Layout({"dense": View(("dp",), (2,))}), rank=dist.get_rank()),
    )
    module = nn.Linear(64, 2, bias=False, dtype=torch.float64)
    sync.attach(placed_parameters([module], place([module], mesh.layout)), mesh, None)
    for microbatch in range(2):
        if microbatch:
            sync.last_microbatch([module.weight])
        x = torch.ones(1, 64, dtype=torch.float64, requires_grad=True)
        uses = [checkpoint(module, x * factor, use_reentrant=reentrant).sum() for factor in (1.0, 10.0)]
        try:
            sum(uses).backward()
        except NanotrainError as error:
            return str(error)
        sync.microbatch_done([module.weight])
    sync.backward_done([module.weight])
    sync.finish()
    return torch.cat([sync.gradient_of(piece).flatten() for piece in sync.pieces()]).tolist()


@pytest.mark.parametrize("name", SYNCS)
def test_a_gradient_that_arrives_in_two_parts_is_refused_and_none_is_lost(name):
    """Each part would be taken for the whole: reentrant checkpointing runs a backward pass of its own."""
    for stage in ({"stage": 1}, {"stage": 2}) if name == "zero12" else ({},):
        for found in run_ranks(sum_of_shared_layer, 2, name, stage, True):
            assert f"{name}: autograd completed the gradient of weight twice" in found
            assert "use_reentrant=False" in found
            assert "overlap = false" in found
        for remedy in ({**stage, "overlap": False}, True), (stage, False):
            for found in run_ranks(sum_of_shared_layer, 2, name, *remedy):
                assert set(found) == {2 * 2 * 11.0}
