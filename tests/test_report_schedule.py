"""The schedule that a report draws: of a run, and of one whose batch grows."""

import pytest
from made_up import MadeUp
from nanotrain_report.folder import Shown, open_run
from nanotrain_report.pipeline import timeline_of

RECIPE = """
[run]
steps = 9
ranks = 2
[batch]
sequences = 8
microbatch = 2
length = 16
[model]
use = "transformer"
layers = 2
width = 16
heads = 2
vocab = 64
[topology]
pp = 2
[schedule]
use = "1f1b"
"""
PHASES = """
[[phase]]
until_tokens = 384
[[phase]]
batch.sequences = 32
"""


@pytest.mark.parametrize(
    ("steps", "microbatches", "sequences", "ideal", "measured"),
    [(3, 4, 8, "20%", "50%"), (5, 16, 32, "6%", "10%")],
    ids=["first phase", "second phase"],
)
def test_the_schedule_is_of_the_newest_batch_and_so_is_the_bubble(
    tmp_path, steps, microbatches, sequences, ideal, measured
):
    """Three steps of 8 sequences of 16 tokens are the first phase."""
    run = MadeUp(tmp_path, steps=9)
    run.start()
    for step in range(1, steps + 1):
        run.step(step, bubble=0.5 if step <= 3 else 0.1)
    run.write()
    (tmp_path / "recipe.toml").write_text(RECIPE + PHASES)
    (chart,) = timeline_of(Shown(open_run(tmp_path), "a run"), alone=True)
    assert f"{microbatches} microbatches of a batch of {sequences} sequences" in chart.title
    assert f"Bubble {ideal} on paper; measured {measured}, median" in chart.note


def test_without_phases_it_is_that_of_the_recipe(tmp_path):
    run = MadeUp(tmp_path, steps=9)
    run.start()
    run.step(1, bubble=0.5)
    run.write()
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (chart,) = timeline_of(Shown(open_run(tmp_path), "a run"), alone=True)
    assert chart.title == "1f1b: 2 stages' ranks, 4 microbatches"
    assert "Bubble 20% on paper; measured 50%, median" in chart.note
