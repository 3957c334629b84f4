"""Which parameters of a script's model are trained, from which gradients, and the mode of its modules."""

import copy

import pytest
import torch
from plain_script import make_loader, make_model, plain_loop
from torch import nn

from nanotrain_core import RuntimeEngine
from nanotrain_core.errors import NanotrainError
from nanotrain_core.layout.gradients import AllReduceGradients
from nanotrain_core.script import ScriptConfig
from nanotrain_core.testing import run_ranks
from nanotrain_core.testing.compare import assert_bitwise
from nanotrain_core.testing.probe import rank


class SometimesTwo(nn.Module):
    """Adds a second head's logits where the first token says so; a third head is never used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 11) for _ in range(3))
        self.double()

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.heads[0](x) + (self.heads[1](x) if tokens[0, 0] % 2 else 0.0)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_parameter_without_a_gradient_is_skipped_as_in_a_plain_loop(accumulate):
    ours, loader = SometimesTwo(), make_loader(batches=6)
    assert len({int(tokens[0, 0] % 2) for tokens, _ in loader}) == 2, "some steps use the second head"
    theirs, unused = copy.deepcopy(ours), ours.heads[2].weight.clone()
    options = {"lr": 0.05, "weight_decay": 0.5}
    config = ScriptConfig(accumulate=accumulate, clip_norm=0.5)
    RuntimeEngine(ours, torch.optim.AdamW(ours.parameters(), **options), config).fit(loader, steps=8)
    plain_loop(theirs, torch.optim.AdamW(theirs.parameters(), **options), loader, 8, accumulate, 0.5)
    assert torch.equal(ours.heads[2].weight, unused), "nothing decays it"
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


def fit_a_rank():
    """Only rank 1's batches use the second head."""
    from nanotrain_core.testing.components.all_reduce_gradients import SummedGradients

    model, rank = SometimesTwo(), torch.distributed.get_rank()
    loader = [pair for pair in make_loader(batches=9) if pair[0][0, 0] % 2 == rank]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5)
    RuntimeEngine(model, optimizer, gradient_sync=SummedGradients()).fit(loader, steps=3)
    return [parameter.detach() for parameter in model.parameters()]


def test_a_parameter_that_another_rank_reached_is_updated_on_all():
    first, second = run_ranks(fit_a_rank, 2)
    assert all(map(torch.equal, first, second))
    start = SometimesTwo()
    moved = [not torch.equal(a, b) for a, b in zip(start.heads.parameters(), first[1:], strict=True)]
    assert moved == [True] * 4 + [False] * 2


class WithBuffers(nn.Module):
    """Initialized by each rank's own random stream, with buffers of two dtypes."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(rank)
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.register_buffer("scale", torch.full((), 1.0 + rank))
        self.register_buffer("mask", torch.tensor([rank == 0, True]))
        self.register_buffer("none", torch.zeros(0, 3))

    def forward(self, tokens):
        return self.head(self.embed(tokens)) * self.scale


def fit_another_model():
    model = WithBuffers(rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = RuntimeEngine(model, optimizer, gradient_sync=AllReduceGradients())
    begun = {name: each.clone() for name, each in model.state_dict().items()}
    engine.fit(make_loader(), steps=3)
    return begun, model.state_dict()


def test_all_ranks_begin_with_the_weights_and_buffers_of_the_first():
    """Each trained a model of its own, with the sum of the gradients of all."""
    first, second = run_ranks(fit_another_model, 2)
    begun, trained = zip(first, second, strict=True)
    assert_bitwise(begun[0], WithBuffers(0).state_dict(), "rank 0 at the beginning")
    assert_bitwise(begun[1], begun[0], "rank 1 at the beginning")
    assert_bitwise(trained[1], trained[0], "rank 1 after three steps")


def fit_once(model, **config):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5)
    engine = RuntimeEngine(model, optimizer, ScriptConfig(**config))
    engine.fit(make_loader(), make_loader(), steps=3)
    return engine


def test_a_frozen_parameter_is_not_even_decayed():
    model = make_model()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    fit_once(model)
    assert torch.equal(model[0].weight, before)


def test_a_parameter_that_is_unfrozen_later_is_not_left_as_it_is():
    model = make_model()
    model[0].requires_grad_(False)
    engine = RuntimeEngine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    engine.fit(make_loader(), steps=1)
    model[0].requires_grad_(True)
    with pytest.raises(NanotrainError, match=r"parameter 0\.weight was frozen when the engine was made"):
        engine.fit(make_loader(), steps=2)


def test_a_model_in_evaluation_mode_is_trained_in_training_mode():
    """As from_pretrained returns it. A part that is in evaluation mode in a model that is not stays so."""
    model = nn.Sequential(nn.Embedding(11, 8), nn.Dropout(0.5), nn.Linear(8, 11)).double().eval()
    seen = []
    model[1].register_forward_hook(lambda module, *_: seen.append(module.training))
    engine = RuntimeEngine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    engine.fit(make_loader(), make_loader(1), steps=2)
    model[1].eval()
    engine.fit(make_loader(), steps=3)
    assert seen == [True, True, False, False]


def test_every_module_keeps_the_mode_its_script_chose():
    model = nn.Sequential(*make_model(), nn.Dropout(0.5), nn.Dropout(0.5))
    model.train()
    model[2].eval()
    fit_once(model, evaluate_every=1)
    assert [module.training for module in model] == [True, True, False, True]


def test_gradients_left_from_before_do_not_enter_the_first_step():
    clean, dirty = make_model(), make_model()
    for parameter in dirty.parameters():
        parameter.grad = torch.full_like(parameter, 100.0)
    fit_once(clean)
    fit_once(dirty)
    assert all(map(torch.equal, clean.parameters(), dirty.parameters()))


def sharded():
    """Return why a script's model of DTensors is refused, of which each rank has all rows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)))
    with pytest.raises(NanotrainError) as caught:
        RuntimeEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), ScriptConfig(clip_norm=0.5))
    return str(caught.value)


def test_a_model_of_dtensors_is_refused():
    """On one rank it trained: unclipped, with gradients that were never zeroed."""
    (text,) = run_ranks(sharded, 1)
    assert text.startswith("parameter 0.weight is a DTensor, as of fully_shard: scripts train")
