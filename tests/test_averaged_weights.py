"""``ema_decay``: an average of the weights, on any layout, in checkpoints, opened as ``RUN@ema``."""

import pytest
import torch
from called_operators import CalledOperators
from command import nanotrain
from compositions import Composition

from nanotrain_core.errors import CheckpointError, Exit
from nanotrain_core.hf.open_weights import open_weights
from nanotrain_core.hf.weights import whole as all_of
from nanotrain_core.registry.registry import load_plugins
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.compare import assert_same, whole
from nanotrain_core.testing.probe import make_engine, train

DECAY = 0.75


def averaging(use="adamw", **config):
    return Case("optimizer", use=use, config={"lr": 0.01, "ema_decay": DECAY, **config})


@pytest.mark.parametrize("use", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize("kind", ["simple", "sharded_v2"])
def test_an_average_is_that_of_the_weights_after_each_step(use, kind, tmp_path, monkeypatch):
    changes = {"run": {"steps": 3}, "checkpoint": {"use": kind}}
    engine = make_engine(averaging(use).alone(), changes, folder=tmp_path / "run")
    parameters = dict(engine.run.stages[0].named_parameters())
    averages = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    step = engine.run.optimizer.step

    def stepped(**options):
        stats = step(**options)
        for name, average in averages.items():
            average.mul_(DECAY).add_(parameters[name].detach(), alpha=1 - DECAY)
        return stats

    monkeypatch.setattr(engine.run.optimizer, "step", stepped)
    engine.fit()
    reader = open_weights(tmp_path / "run@ema", load_plugins()).reader
    for name, average in averages.items():
        found = reader.read(name, all_of(average.shape))
        torch.testing.assert_close(found, average, rtol=0, atol=1e-12)
        assert not torch.equal(found, parameters[name])


@pytest.mark.parametrize("found_inf", [None, 0.0, 1.0])
def test_all_averages_move_in_one_call_and_by_nothing_in_a_skipped_step(found_inf):
    engine = make_engine(averaging().alone(), {"run": {"steps": 1}})
    engine.fit()
    optimizer = engine.run.optimizer
    with torch.no_grad():
        for shard in optimizer.master_shards:
            shard.weight.add_(1.0)
    weights = [shard.weight.detach().clone() for shard in optimizer.master_shards]
    averages = [optimizer.inner.state[shard.weight]["ema"] for shard in optimizer.master_shards]
    share = 0.0 if found_inf else 1 - DECAY
    expected = [average.lerp(weight, share) for average, weight in zip(averages, weights, strict=True)]
    with torch.no_grad(), CalledOperators() as operators:
        found = None if found_inf is None else torch.tensor(found_inf)
        optimizer._average(optimizer.master_shards, found)
    assert all(map(torch.equal, averages, expected))
    assert all(map(torch.equal, (shard.weight for shard in optimizer.master_shards), weights))
    assert len([each for each in operators.called if each is not torch.ops.aten.detach.default]) <= 2


def test_a_run_without_an_average_is_refused(tmp_path):
    case = Case("optimizer", use="sgd", config={"lr": 0.01}).alone()
    make_engine(case, {"run": {"steps": 1}, "checkpoint": {"use": "simple"}}, folder=tmp_path / "run").fit()
    with pytest.raises(CheckpointError, match=r"has no averaged weights: expected a run with optimizer\.ema"):
        open_weights(tmp_path / "run@ema", load_plugins())


def layout(**choices):
    defaults = {"tp": 1, "pp": 1, "dp": 1, "ep": 1, "etp": 1, "schedule": "accumulate", "sp": False}
    more = {"model": "moe", "tied": False, "microbatch": 2, "experts_first": False, "zero": 0}
    return Composition(**(defaults | more | choices))


def run(composition, folder, **options):
    optimizer = composition.optimizers()["adamw"] | {"ema_decay": DECAY}
    changes = {"optimizer": optimizer, "checkpoint": {"use": "sharded_v2"}}
    return run_ranks(train, composition.ranks, composition.case(), changes, folder=folder, **options)


@pytest.mark.full
def test_it_is_the_same_on_every_layout_and_goes_on_on_another(tmp_path):
    straight = run(layout(), tmp_path / "one")
    sharded = layout(tp=2, dp=2, ep=2, sp=True, zero=2)
    found = run(sharded, tmp_path / "many", save_at=2)
    resumed = run(layout(pp=2, schedule="1f1b"), tmp_path / "many", resume="2")
    want = whole([straight[0].state])
    assert any(name.startswith("ema/") for name in want)
    for traces in (found, resumed):
        assert_same(whole([t.state for t in traces], atol=1e-9), want, "state", atol=1e-9)


RECIPE = """
[run]
steps = 3
device = "cpu"
[batch]
sequences = 4
microbatch = 4
length = 16
[model]
use = "transformer"
layers = 1
width = 16
heads = 2
vocab = 256
[optimizer]
use = "adamw"
lr = 0.05
ema_decay = 0.9
[evaluation]
every = 3
sequences = 4
[precision]
use = "bf16"
"""


@pytest.mark.full
def test_commands_open_it(tmp_path):
    (tmp_path / "mine.toml").write_text(RECIPE)
    commands = [
        ("run", "mine.toml", "--folder", "mine"),
        ("eval", "mine"),
        ("eval", "mine@ema"),
        ("sample", "mine@ema", "--tokens", "3", "--prompt", "a"),
        ("convert", "mine@ema", "averaged"),
        ("run", "mine.toml", "--folder", "more", "--weights", "mine@ema"),
    ]
    out = []
    for words in commands:
        ended = nanotrain(*words, cwd=tmp_path)
        assert ended.code == Exit.DONE, (words, ended.err)
        out.append(ended.out)
    assert out[1] != out[2]
