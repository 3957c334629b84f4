"""Speeds of a run whose batch grows."""

from types import SimpleNamespace

import pytest
from nanotrain_performance import ThroughputConfig
from nanotrain_performance.throughput import Throughput

from nanotrain_core.api import resolve_recipe

RECIPE = """
[run]
steps = 10
[batch]
sequences = 8
microbatch = 2
length = 16
[model]
use = "transformer"
layers = 1
width = 16
heads = 2
vocab = 64
[[phase]]
batch.sequences = 32
"""


def test_samples_are_those_of_the_batch_now(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    told, monitor = {}, Throughput(ThroughputConfig())
    monitor.run = SimpleNamespace(
        metrics=SimpleNamespace(scalar=told.__setitem__),
        recipe=resolve_recipe(str(path)).recipe,
        world_size=1,
        flops_per_token=0.0,
    )
    monitor.effective, monitor.paced = None, None
    monitor._speed(
        SimpleNamespace(step=1, seconds=2.0, tokens_per_second=32 * 16 / 2.0, length=16, flops_per_token=0.0),
        1,
    )
    assert told["speed/samples_per_second"] == pytest.approx(32 / 2.0)
