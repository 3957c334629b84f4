"""The capstone, one command: it learns, all ranks hold the same weights, and each a quarter of the state."""

import re
from random import Random

import pytest
from command import nanotrain

from nanotrain_core.errors import Exit
from nanotrain_core.testing.chaos.bench import Bench, Settings
from nanotrain_core.testing.chaos.corruption import FlipWeight

RANKS = 4


def test_it_learns_and_shows_that_state_is_sharded(tmp_path):
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
    told = r"state of a rank: ([\d,]+) bytes at most = ([\d.]+) P/N, ([\d,]+) in the mean = ([\d.]+) P/N"
    (numbers,) = re.findall(told + r", P = ([\d,]+) parameters, N = 4 ranks$", done.out, re.MULTILINE)
    most, most_units, mean, mean_units, total = (float(each.replace(",", "")) for each in numbers)
    assert mean <= most == pytest.approx(max(float(row[2]) for row in rows) * 1e6, abs=500)
    assert 8 * total < RANKS * mean < 8.1 * total  # beside the moments a counter for each range
    assert (most_units, mean_units) == pytest.approx((most * RANKS / total, mean * RANKS / total), abs=0.005)


def test_with_masters_it_is_twelve_bytes(tmp_path):
    words = (
        "--nproc",
        "1",
        "--set",
        "run.steps=1",
        "--set",
        "precision.use=bf16",
        "--set",
        "evaluation.sequences=0",
    )
    done = nanotrain("run", "capstone", *words, cwd=tmp_path)
    assert re.search(r"in the mean = 12\.0\d P/N, P = 28,032 parameters, N = 1 ranks", done.out), done.out


def test_a_run_of_several_machines_cannot_be_verified_by_one(tmp_path):
    done = nanotrain("run", "capstone", "--nnodes", "2", "--verify-resume", cwd=tmp_path)
    assert done.code == Exit.USER
    assert "--verify-resume: one machine must start the run; use `nanotrain ckpt replay`" in done.err


@pytest.mark.full
def test_resumed_from_step_ten_it_arrives_at_the_same_bytes(tmp_path):
    done = nanotrain("run", "capstone", "--verify-resume", cwd=tmp_path)
    assert done.code == Exit.DONE
    assert done.out.endswith("RESUME VERIFIED\n")
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
