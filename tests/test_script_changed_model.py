"""A script that changes its model, or what its optimizer trains, after the engine was made is told so."""

import pytest
import torch
from torch import nn

from nanotrain_core import RuntimeEngine
from nanotrain_core.contracts import Monitor
from nanotrain_core.errors import NanotrainError
from nanotrain_core.script import ScriptConfig

TOKENS = torch.arange(24).view(4, 6) % 11
LOADER = [(TOKENS, (TOKENS + 1) % 11)]


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter."""

    def __init__(self, base):
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def make(callbacks=(), **config):
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, RuntimeEngine(model, optimizer, ScriptConfig(**config), callbacks=callbacks)


def test_an_adapter_that_is_added_later_is_refused(tmp_path):
    """Its gradients were never zeroed nor reduced; the first save ended in a KeyError."""
    model, optimizer, engine = make(folder=tmp_path)
    engine.fit(LOADER, steps=1)
    model[1] = Adapted(model[1])
    optimizer.add_param_group({"params": [model[1].down.weight, model[1].up.weight]})
    told = (
        r"\(new: 1.down.weight, new: 1.up.weight; 2 new, 0 gone in all\): make the engine after changing the"
    )
    with pytest.raises(NanotrainError, match=told):
        engine.fit(LOADER, steps=2)
    again = RuntimeEngine(model, optimizer, ScriptConfig())
    before = model[1].up.weight.clone()
    again.fit(LOADER, steps=2)
    assert not torch.equal(model[1].up.weight, before)


def test_a_replaced_layer_is_refused():
    """It was never trained."""
    model, _, engine = make()
    model[2] = nn.Linear(8, 11, bias=False)
    with pytest.raises(NanotrainError, match=r"gone: 2.weight, gone: 2.bias; 1 new, 2 gone in all"):
        engine.fit(LOADER, steps=1)


def test_a_removed_layer_is_refused():
    model, _, engine = make()
    del model[1]
    with pytest.raises(NanotrainError, match=r"\(gone: 1.weight, gone: 1.bias; 0 new, 2 gone in all\)"):
        engine.fit(LOADER, steps=1)


class Gives(Monitor):
    """Gives the optimizer another parameter after a step."""

    def __init__(self):
        self.optimizer = None

    def on_step(self, report):
        self.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


@pytest.mark.parametrize("steps", [1, 2])
def test_a_parameter_that_the_optimizer_is_given_during_training_is_refused(tmp_path, steps):
    """By the next step, or by the save if there is none."""
    gives = Gives()
    _, gives.optimizer, engine = make([gives], folder=tmp_path)
    with pytest.raises(NanotrainError, match=r"a parameter of shape \(3,\) that the model did not have when"):
        engine.fit(LOADER, steps=steps)


def test_a_head_that_is_replaced_during_training_is_refused_by_the_save(tmp_path):
    class Replaces(Monitor):
        def on_step(self, report):
            model[2] = nn.Linear(8, 11)

    model, _, engine = make([Replaces()], folder=tmp_path)
    with pytest.raises(NanotrainError, match=r"new: 2.weight, new: 2.bias"):
        engine.fit(LOADER, steps=1)


def test_a_part_of_the_model_that_the_optimizer_is_given_later_is_trained():
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    engine = RuntimeEngine(model, optimizer)
    engine.fit(LOADER, steps=1)
    before = model[0].weight.clone()
    optimizer.add_param_group({"params": [model[0].weight]})
    engine.fit(LOADER, steps=2)
    assert not torch.equal(model[0].weight, before)
