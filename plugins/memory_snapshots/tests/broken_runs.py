"""Runs in this process that are broken off, and go on as if a launcher had started them again."""

import contextlib

import attrs
import torch
import torch.distributed as dist

from nanotrain_core.api.torch import Monitor, RuntimeEngine

RECIPE = """
[run]
name = "small"
steps = 9
ranks = 1
deterministic = true
[batch]
sequences = 2
microbatch = 2
length = 8
[model]
use = "transformer"
layers = 1
width = 16
heads = 2
vocab = 64
[precision]
use = "fp32"
[optimizer]
use = "adamw"
lr = 0.01
[evaluation]
every = 4
sequences = 2
[data]
use = "synthetic"
vocab = 64
[checkpoint]
use = "simple"
every = 100
[[monitor]]
use = "memory_snapshots"
"""

IDENTITY = {"the recipe": "r", "the number of ranks": "1", "the code of nanotrain_core": "c"}


class Killed(BaseException):
    """Stands for the end of a process: no monitor keeps it from ending the run."""


class Watch(Monitor):
    """Keeps losses, and breaks the run off in ``on_step`` of a step."""

    every_step = True

    def __init__(self, dies_at=None, act=lambda run: None):
        self.dies_at, self.act, self.losses = dies_at, act, {}

    def on_start(self, run):
        self.run, self.first = run, run.first_step

    def on_step(self, report):
        self.losses[report.step] = report.loss
        if report.step == self.dies_at:
            self.act(self.run)
            raise Killed


@attrs.define
class Ran:
    """One attempt."""

    first: int
    losses: dict
    weights: list
    recoverable: list


def attempt(
    tmp_path,
    name,
    *,
    again=False,
    dies_at=None,
    identity=IDENTITY,
    may_restart=True,
    recipe=RECIPE,
    shm=None,
    monitors=(),
    act=lambda run: None,
):
    """Take the run ``name`` up, and let it go on to the end or to ``dies_at``."""
    own = f'use = "memory_snapshots"\nfolder = "{shm or tmp_path}"'
    rank = dist.get_rank() if dist.is_initialized() else 0
    path = tmp_path / f"recipe-{rank}.toml"
    path.write_text(recipe.replace('use = "memory_snapshots"', own))
    watch, recoverable = Watch(dies_at, act), []
    engine = RuntimeEngine.from_recipe(
        path,
        rank=rank,
        folder=tmp_path / name,
        resume="auto" if again else None,
        callbacks=[watch, *monitors],
    )
    engine.restart = attrs.evolve(
        engine.restart,
        may_restart=may_restart,
        restarted=again,
        identity=lambda: identity,
        recoverable=recoverable.append,
    )
    with contextlib.suppress(Killed):
        engine.fit()
    weights = [placed.parameter.detach().clone() for placed in engine.run.placed]
    return Ran(watch.first, watch.losses, weights, recoverable)


def same(one, other):
    """Return whether two attempts ended with the same bits."""
    return all(torch.equal(a, b) for a, b in zip(one.weights, other.weights, strict=True))


def folders(tmp_path):
    """Return the folders of snapshots that are left."""
    return [*tmp_path.glob("nanotrain-snapshots-*")]
