"""The state that hooks keep between two calls: used where it is right, gone where it is not."""

from unittest import mock
from weakref import ref

import pytest
import torch
from nanotrain_tp.regions import BiasedRow, ShardedRegion
from torch import nn
from torch.utils.checkpoint import checkpoint

from nanotrain_core.models import transformer
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import train


def boundary():
    """Return one whose tokens are whole, so that entering needs no other rank."""
    return ShardedRegion(mock.Mock(size=2, index=0), sequence_parallel=False)


def test_readers_of_one_tensor_share_its_entry():
    x, edge = torch.ones(1, 2, 3, requires_grad=True) * 2, boundary()
    assert edge.enter(x) is edge.enter(x)
    assert edge.enter(x.clone()) is not edge.enter(x)


def test_an_entry_is_not_used_for_what_has_changed_since():
    x, edge = torch.ones(1, 2, 3), boundary()
    before = edge.enter(x)
    x.add_(1)
    assert edge.enter(x) is not before


def test_an_entry_made_without_gradients_is_not_used_with_them():
    x, edge = torch.ones(1, 2, 3, requires_grad=True), boundary()
    with torch.no_grad():
        edge.enter(x)
    assert edge.enter(x).requires_grad


def test_nothing_is_kept_beyond_a_block():
    x, edge = torch.ones(1, 2, 3), boundary()
    before = edge.enter(x)
    edge.forget()
    assert edge.enter(x) is not before


def test_a_layer_that_is_computed_again_leaves_nothing_alive():
    edge, entered = boundary(), []
    edge.ranks.all_reduce = lambda gradient: gradient

    def layer(x):
        entered.append(ref(doubled := x * 2))
        return (edge.enter(doubled) ** 2).sin()

    checkpoint(layer, torch.ones(1, 2, 3, requires_grad=True), use_reentrant=False).sum().backward()
    assert [each() for each in entered] == [None, None]


class Fails(nn.Linear):
    def forward(self, x):
        assert self.bias is None, "the local product must leave the bias out"
        raise OSError("broken")


def test_a_row_that_fails_keeps_its_bias():
    module = Fails(3, 3)
    bias, row = module.bias, BiasedRow(boundary())
    module.register_forward_pre_hook(row.before)
    module.register_forward_hook(row.after, always_call=True)
    with pytest.raises(OSError, match="broken"):
        module(torch.ones(1, 3))
    assert module.bias is bias
    assert list(module.state_dict()) == ["weight", "bias"]


def train_recomputing(case, changes, **options):
    forward = transformer.Block.forward

    def recompute(self, *inputs):
        return checkpoint(forward, self, *inputs, use_reentrant=False)

    with mock.patch.object(transformer.Block, "forward", recompute):
        return train(case, changes, **options)


@pytest.mark.full
@pytest.mark.parametrize("sequence_parallel", [True, pytest.param(False, marks=pytest.mark.full)])
def test_recomputed_layers_have_the_same_gradients(sequence_parallel):
    case = Case(
        "parallel",
        use="tp",
        config={"sequence_parallel": sequence_parallel},
        topology={"tp": 2},
        overrides={"parallel": [{"use": "tp"}, {"use": "summed"}], "model": {"bias": True}},
    )
    changes = {"run": {"steps": 1}}
    options = {"check_collectives": True, "log_collectives": True}
    kept, recomputed = (run_ranks(f, 2, case, changes, **options) for f in (train, train_recomputing))
    for one, other in zip(kept, recomputed, strict=True):
        assert len(one.collectives) < len(other.collectives), "nothing was recomputed"
        for block, again in zip(one.gradients, other.gradients, strict=True):
            assert torch.equal(block.tensor, again.tensor), block.name
