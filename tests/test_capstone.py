"""The capstone, one command: it learns, all ranks hold the same weights, and each a quarter of the state."""

import re
from random import Random

import pytest
from command import nanotrain

from nanotrain_core.errors import Exit
from nanotrain_core.testing.chaos.bench import Bench, Settings
from nanotrain_core.testing.chaos.numbers import FlipWeight

RANKS = 4


def test_it_learns_and_shows_that_state_is_shared_out(tmp_path):
    done = nanotrain("run", "capstone", cwd=tmp_path)
    assert (done.code, done.err) == (Exit.DONE, "")
    losses = [float(found) for found in re.findall(r"^ +\d+/20 +(\S+)", done.out, re.MULTILINE)]
    assert losses[0] == pytest.approx(4.16, abs=0.1)
    assert losses[-1] < losses[0] - 1
    assert re.search("equal.* on all ranks .*in 22 comparisons", done.out)  # 20 steps, 2 checkpoints
    rows = re.findall(r"^ +(\d) +(0\.\d+) +(0\.\d+) +\d+\.\d$", done.out, re.MULTILINE)
    assert [int(rank) for rank, *_ in rows] == list(range(RANKS))
    for _, weights, optimizer in rows:
        parameters = float(weights) / 4
        assert float(optimizer) == pytest.approx(8 * parameters / RANKS, abs=0.002)


@pytest.mark.full
def test_resumed_from_step_ten_it_arrives_at_the_same_bytes(tmp_path):
    assert nanotrain("run", "capstone", cwd=tmp_path).code == Exit.DONE
    shown = nanotrain("ckpt", "show", "runs/capstone", "--step", "10", cwd=tmp_path)
    assert f"world_size   {RANKS}" in shown.out, shown.err
    again = nanotrain("ckpt", "replay", "runs/capstone", "--step", "10", cwd=tmp_path)
    assert again.code == Exit.DONE, again.out + again.err
    assert "steps 10 to 20 again: 8 files byte-equal" in again.out
    assert again.out.endswith("RESUME VERIFIED\n")


@pytest.mark.full  # tests/test_chaos.py flips one of a smaller run
def test_a_flipped_bit_ends_it_with_code_six_and_the_name_of_the_rank(tmp_path):
    """Resumed, it ends with the weights of a run that nothing happened to: none of it was saved."""
    bench = Bench(Settings(recipe="capstone", ranks=RANKS, steps=6, every=3), tmp_path)
    assert FlipWeight().run(bench, "flipped", Random(1)).problems == []
