"""Batches that ranks or microbatches cannot share out evenly."""

import pytest
from nanotrain_plan.hardware import find_hardware
from nanotrain_plan.plan import make_plan, to_json

from nanotrain_core.api import resolve_recipe

RECIPE = """
[run]
steps = 20
ranks = {ranks}
[batch]
sequences = {sequences}
microbatch = {microbatch}
length = 1024
[model]
use = "transformer"
layers = 2
width = 512
heads = 4
vocab = 1024
[[parallel]]
use = "ddp"
[precision]
use = "bf16"
[data]
use = "synthetic"
vocab = 256
"""


@pytest.fixture
def plan(tmp_path):
    def plan_of(sequences, microbatch, *, ranks=1, more="", **changes):
        path = tmp_path / "recipe.toml"
        text = RECIPE.format(sequences=sequences, microbatch=microbatch, ranks=ranks)
        path.write_text(text + more)
        sets = [f"{key.replace('__', '.')}={value}" for key, value in changes.items()]
        found = resolve_recipe(str(path), overrides=sets)
        return make_plan(found.recipe, found.registry, found.layout, find_hardware("h100"))

    return plan_of


def test_a_step_takes_as_long_and_as_much_as_on_the_ranks_with_most_sequences(plan):
    """Of 7 sequences the first of 4 ranks has one and the others two."""
    uneven, even = plan(7, 8, ranks=4), plan(8, 8, ranks=4)
    assert uneven.time.seconds == even.time.seconds
    assert uneven.worst.peak == even.worst.peak
    assert uneven.executed == pytest.approx(even.executed)  # of a token
    told = to_json(uneven)["time"]
    assert told["mfu"] < told["hfu"]
