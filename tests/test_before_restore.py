"""A monitor may bring checkpoints to a run before it looks for its own."""

import shutil

import pytest

from nanotrain_core.contracts import Monitor
from nanotrain_core.engine import RuntimeEngine
from nanotrain_core.errors import CheckpointError

RECIPE = """
[run]
name = "small"
steps = 4
ranks = 1
[batch]
sequences = 2
microbatch = 2
length = 8
[model]
use = "transformer"
layers = 1
width = 16
heads = 2
vocab = 256
[precision]
use = "fp32"
[optimizer]
use = "adamw"
lr = 0.01
[data]
use = "synthetic"
vocab = 256
[checkpoint]
use = "simple"
every = 2
"""


class Brings(Monitor):
    """Copies a folder of checkpoints to where the run looks for them."""

    def __init__(self, source):
        self.source, self.asked, self.losses = source, [], {}

    def on_before_restore(self, restore):
        self.asked.append((restore.which, [*restore.steps()]))
        if self.source is not None:
            shutil.copytree(self.source, restore.folder)

    def on_step(self, report):
        self.losses[report.step] = report.loss


class Refuses(Monitor):
    def on_before_restore(self, restore):
        raise CheckpointError("they are somewhere else")


def fit(tmp_path, name, monitor, resume=None):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    engine = RuntimeEngine.from_recipe(recipe, folder=tmp_path / name, resume=resume, callbacks=[monitor])
    engine.fit()


def test_a_run_resumes_from_what_a_monitor_brought(tmp_path):
    through, brings = Brings(None), Brings(tmp_path / "one" / "checkpoints")
    fit(tmp_path, "one", through)
    fit(tmp_path, "two", brings, resume="2")
    assert (through.asked, brings.asked) == ([(None, [])], [("2", [])])
    assert brings.losses == {step: through.losses[step] for step in (3, 4)}


class Fails(Monitor):
    def on_before_restore(self, restore):
        raise KeyError("by mistake")


def test_a_mistake_ends_the_run_too(tmp_path):
    """Going on would begin anew in the place of what was to be brought."""
    with pytest.raises(KeyError, match="by mistake"):
        fit(tmp_path, "one", Fails())


def test_a_refusal_ends_the_run(tmp_path):
    with pytest.raises(CheckpointError, match="somewhere else"):
        fit(tmp_path, "one", Refuses())


def test_a_monitor_that_says_it_is_alive_is_not_taken_for_a_hang(tmp_path):
    """The detector sees a count that goes up, still in the phase that may take long."""

    class Fetches(Monitor):
        def on_before_restore(self, restore):
            before = engine.progress.count
            restore.heartbeat()
            seen.append((engine.progress.count - before, engine.progress.phase, engine.progress.slow))

    seen = []
    (tmp_path / "small.toml").write_text(RECIPE)
    path = tmp_path / "small.toml"
    engine = RuntimeEngine.from_recipe(path, folder=tmp_path / "run", callbacks=[Fetches()])
    engine.fit()
    assert seen == [(1, "start", True)]
