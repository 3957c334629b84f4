"""What modules of a script keep outside of parameters and buffers is saved and restored."""

import pytest
import torch
from command import nanotrain
from torch import nn

from nanotrain_core import RuntimeEngine
from nanotrain_core.contracts import Monitor
from nanotrain_core.errors import CheckpointError
from nanotrain_core.layout.gradients import AllReduceGradients
from nanotrain_core.script import ScriptConfig
from nanotrain_core.testing import run_ranks
from nanotrain_core.testing.probe import rank

TOKENS = torch.arange(24).view(4, 6) % 11
LOADER = [(TOKENS, (TOKENS + 1) % 11), (TOKENS, (TOKENS + 2) % 11)]


class Scaled(nn.Linear):
    """As modules for fp8 do, keeps its scales outside of buffers, none of them at first."""

    def __init__(self):
        super().__init__(8, 11)
        self.scales = None

    def forward(self, tensor):
        before = self.scales or {"steps": 0, "largest": [torch.zeros(())]}
        largest = torch.maximum(before["largest"][0] * 0.9, tensor.detach().abs().max())
        self.scales = {"steps": before["steps"] + 1, "largest": [largest]}
        return super().forward(tensor / (1 + largest))

    def get_extra_state(self):
        return self.scales

    def set_extra_state(self, state):
        self.scales = state


class Losses(Monitor):
    def __init__(self):
        self.found = []

    def on_step(self, report):
        self.found.append(report.loss)


def script(folder, steps, module=None, sync=None, **config):
    torch.manual_seed(0)
    module = module or Scaled()
    model, losses = nn.Sequential(nn.Embedding(11, 8), module), Losses()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    settings = ScriptConfig(folder=folder, **config)
    engine = RuntimeEngine(model, optimizer, settings, callbacks=[losses], gradient_sync=sync)
    engine.fit(LOADER, steps=steps)
    return engine, module, losses.found


def test_a_resumed_script_has_the_extra_state_of_its_modules(tmp_path):
    """A resumed run had begun with that of a new model; then such a model was refused."""
    _, module, straight = script(tmp_path / "straight", 6)
    script(tmp_path / "stopped", 3)
    _, resumed, after = script(tmp_path / "stopped", 6, resume="auto")
    assert after == straight[3:]
    assert resumed.scales == module.scales
    assert module.scales["steps"] == 6


def test_going_back_takes_extra_state_back(tmp_path):
    engine, module, _ = script(tmp_path, 4, save_every=1, keep=9)
    assert engine.load("2")
    assert module.scales["steps"] == 2


def test_a_checkpoint_with_extra_state_needs_a_model_that_has_it(tmp_path):
    script(tmp_path, 1)
    assert "extra_state: 1" in nanotrain("ckpt", "show", str(tmp_path), cwd=tmp_path).out
    with pytest.raises(
        CheckpointError, match="it holds 'extra_state' tensors, which this run has no place for"
    ):
        script(tmp_path, 2, nn.Linear(8, 11), resume="auto")


class Unreadable(Scaled):
    """Returns an object that only unpickling of anything could read."""

    def get_extra_state(self):
        return self.scales and Losses()


class OneWay(nn.Linear):
    """Has state that cannot be set."""

    def get_extra_state(self):
        return {}


def test_extra_state_that_could_not_be_read_again_is_refused(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"1\._extra_state, of get_extra_state\(\), cannot be saved: exp"
    ):
        script(tmp_path, 1, Unreadable())
    with pytest.raises(
        CheckpointError, match=r"1\._extra_state cannot be restored: its module does not define"
    ):
        script(tmp_path, 0, OneWay(8, 11))
    script(None, 1, Unreadable())


def of_each_rank(folder):
    """Return the extra state of each rank, which has another form on the second, and after a resume."""
    module = Scaled()
    module.scales = {"steps": 10 * rank(), "largest": [torch.zeros(())], "more": "x" * rank()}
    script(folder, 1, module, AllReduceGradients())
    _, resumed, _ = script(folder, 2, None, AllReduceGradients(), resume="auto")
    return module.scales["steps"], resumed.scales["steps"]


def test_all_ranks_resume_with_the_extra_state_of_the_first(tmp_path):
    """As with buffers; other numbers of ranks then have it too."""
    assert run_ranks(of_each_rank, 2, tmp_path) == [(1, 2), (11, 2)]
