"""The average of weights on the page of optimizers: state of any layout, which becomes weights of its own."""

import re
from pathlib import Path

import safetensors.torch
import tomli_w
import torch

from nanotrain_core.api import find_checkpoint
from nanotrain_core.hf.open_weights import open_weights
from nanotrain_core.registry.registry import load_plugins
from nanotrain_core.testing import Case
from nanotrain_core.testing.checks.optimizer import layout_changes_nothing
from nanotrain_core.testing.probe import make_engine

PAGE = Path(__file__).parents[1] / "docs/kinds/optimizer.md"
PLUGIN = '''
import attrs
from nanotrain_core.api import Component, OptimizerConfig, hookimpl


@attrs.define(frozen=True, kw_only=True)
class AveragingConfig(OptimizerConfig):
    """Averages weights."""

    decay: float = 0.75
    """Share that each step keeps."""


@hookimpl
def nanotrain_register_optimizer(register):
    register(Component(name="averaging", config=AveragingConfig, factory=f"{__name__}:build"))


def build(config):
    import torch
    from nanotrain_core.api.torch import MasterOptimizer

    found = {"torch": torch}
    exec(BLOCK, found)
    Averaging = type("Averaging", (MasterOptimizer,), {n: found[n] for n in ("make", "initial_state")})
    return Averaging(config)
'''


def block(begin):
    (found,) = [
        b for b in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL) if begin in b
    ]
    return found


def averaging(tmp_path, **settings):
    plugin = tmp_path / "averaging.py"
    plugin.write_text(f"BLOCK = {block('class Averaged')!r}\n{PLUGIN}")
    return Case("optimizer", use="averaging", config={"lr": 0.01}, plugins=[str(plugin)], **settings)


def test_an_average_is_that_of_one_process_with_ranges(tmp_path):
    layout_changes_nothing(
        averaging(tmp_path, topology={"dp": 2}, overrides={"parallel": [{"use": "ranged"}]})
    )


def test_an_average_becomes_weights(tmp_path, monkeypatch):
    changes = {"run": {"steps": 3}, "checkpoint": {"use": "simple"}}
    seen = []
    engine = make_engine(averaging(tmp_path), changes, folder=tmp_path / "runs/mine")
    (name, parameter), *_ = engine.run.stages[0].named_parameters()
    average = parameter.detach().clone()
    step = engine.run.optimizer.step

    def stepped(**options):
        stats = step(**options)
        seen.append(average.lerp_(parameter.detach(), 0.25).clone())
        return stats

    monkeypatch.setattr(engine.run.optimizer, "step", stepped)
    engine.fit()
    monkeypatch.chdir(tmp_path)
    names = {"find_checkpoint": find_checkpoint, "load_plugins": load_plugins, "Path": Path}
    exec(block('Path("averaged")'), {**names, "safetensors": safetensors, "tomli_w": tomli_w})
    opened = open_weights(tmp_path / "averaged", load_plugins())
    whole = tuple(slice(None) for _ in parameter.shape)
    torch.testing.assert_close(opened.reader.read(name, whole), seen[2], rtol=0, atol=1e-12)
