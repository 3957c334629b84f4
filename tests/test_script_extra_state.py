"""What modules of a script keep outside of parameters and buffers is saved and restored."""

from unittest import mock

import pytest
import torch
from command import nanotrain
from safetensors import safe_open
from torch import nn

from nanotrain_core import RuntimeEngine
from nanotrain_core.contracts import Monitor
from nanotrain_core.errors import CheckpointError
from nanotrain_core.layout.gradients import AllReduceGradients
from nanotrain_core.script import ScriptConfig
from nanotrain_core.script.checkpoint import own_buffers
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
    """Other numbers of ranks then have it too."""
    assert run_ranks(of_each_rank, 2, tmp_path) == [(1, 2), (11, 2)]


class Centered(nn.Linear):
    """Subtracts a mean of what this rank was given, and keeps a buffer that is the same on all ranks."""

    def __init__(self):
        super().__init__(8, 11)
        self.register_buffer("center", torch.zeros(8))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, tensor):
        self.passes += 1
        self.center.lerp_(tensor.detach().mean((0, 1)) * (1 + rank()), 0.1)
        return super().forward(tensor - self.center)


def centered(folder, steps, **config):
    _, module, losses = script(folder, steps, Centered(), AllReduceGradients(), **config)
    return losses, module.center.tolist(), module.passes.item()


def test_each_rank_resumes_with_its_own_buffers_and_another_number_with_those_of_the_first(tmp_path):
    straight = run_ranks(centered, 2, tmp_path / "straight", 4)
    stopped = run_ranks(centered, 2, tmp_path / "stopped", 2)
    assert stopped[0][1] != stopped[1][1]
    assert run_ranks(centered, 1, tmp_path / "stopped", 2, resume="auto")[0][1:] == stopped[0][1:]
    with safe_open(tmp_path / "stopped/checkpoints/step-00000002.safetensors", "pt") as file:
        assert [key for key in file.keys() if "/buffer/" in key] == ["rng/1/buffer/1.center"]  # noqa: SIM118
    resumed = run_ranks(centered, 2, tmp_path / "stopped", 4, resume="auto")
    for (losses, *buffers), (told, *rest) in zip(resumed, straight, strict=True):
        assert (losses, buffers) == (told[2:], rest)


def test_buffers_that_are_alike_on_all_ranks_are_not_copied_by_a_save():
    """A mean of weights as buffers took as much host memory as the model on every rank, and minutes."""
    module = nn.BatchNorm1d(4)
    kept = dict(module.named_buffers())
    others = nn.BatchNorm1d(4)
    others.running_var += 1
    mesh, gathered = mock.Mock(world_size=2), []
    mesh.gather = lambda value: gathered.append(value) or [gathered[0], value]
    own_buffers(others, mesh)
    copied, cpu = [], torch.Tensor.cpu
    with mock.patch.object(
        torch.Tensor, "cpu", lambda tensor: copied.append(tensor.data_ptr()) or cpu(tensor)
    ):
        found = own_buffers(module, mesh)
    assert found.keys() == {"buffer/running_var"}
    assert copied == [kept["running_var"].data_ptr()]
    module.running_var = torch.zeros(5)
    assert not own_buffers(module, mesh)
