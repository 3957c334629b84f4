"""A soak draws its faults from a seed, spreads them over the run, and compares the end with nobody's hurt."""

from itertools import pairwise
from random import Random

import pytest
from test_chaos import RECIPE

from nanotrain_core.cli import main
from nanotrain_core.errors import Exit
from nanotrain_core.testing.chaos.bench import Bench, Settings
from nanotrain_core.testing.chaos.inject import Order
from nanotrain_core.testing.chaos.soak import FAULTS, draw, hurt, launches


def test_faults_are_of_the_seed_one_in_each_part_of_the_run():
    settings = Settings(recipe="small", ranks=4, steps=401, every=4)
    faults = draw(settings, 79, Random("7"))
    assert faults == draw(settings, 79, Random("7")) != draw(settings, 79, Random("8"))
    assert [(fault.order["step"] - 5) // 5 for fault in faults] == list(range(79))
    assert {fault.name for fault in faults} == {fault.name for fault in FAULTS}
    assert {fault.order["rank"] for fault in faults} == {-1, 0, 1, 2, 3}
    alone = draw(Settings(recipe="small", ranks=1, steps=401, every=4), 79, Random("7"))
    assert "flip" not in {fault.order["act"] for fault in alone}  # nobody has the same weights


def test_no_two_faults_are_in_consecutive_steps():
    """A rank that is sent SIGTERM at step n may stop after step n + 1, where the next launch then begins."""
    settings = Settings(recipe="small", ranks=4, steps=86, every=4)
    steps = [fault.order["step"] for fault in draw(settings, 40, Random("7"))]
    assert min(after - before for before, after in pairwise(steps)) == 2
    assert steps[0] >= 5
    assert steps[-1] < 85


def test_a_launch_has_the_faults_up_to_one_that_ends_it():
    by_act = {fault.order["act"]: fault for fault in FAULTS}
    acts = ("kill", "stop", "terminate", "flip", "fail")
    groups = [[fault.order["act"] for fault in group] for group in launches([by_act[act] for act in acts])]
    assert groups == [["kill", "stop", "terminate"], ["flip"], ["fail"]]
    assert [*launches([by_act["flip"]])][-1] == []  # the launch that comes to the end


def test_each_attempt_has_its_own_order_and_further_ones_none():
    order = Order(ledger="x", act="kill", step=3, then=[{"act": "stop", "step": 9, "at": "data"}])
    assert [(order.of(n).act, order.of(n).step) for n in range(2)] == [("kill", 3), ("stop", 9)]
    assert order.of(2).act == ""


def test_a_run_too_short_is_refused(tmp_path, capsys):
    (tmp_path / "small.toml").write_text(RECIPE)
    words = ["chaos", str(tmp_path / "small.toml"), "--nproc", "2", "--steps", "9", "--soak", "2"]
    assert main(words) == Exit.USER
    assert "--soak 2: 9 steps are too few for so many faults after" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, 2])
def test_a_run_that_is_hurt_eight_times_ends_as_the_undisturbed_one(tmp_path, seed):
    (tmp_path / "small.toml").write_text(RECIPE)
    settings = Settings(recipe=str(tmp_path / "small.toml"), ranks=4, steps=60, every=4, hang_timeout=8.0)
    soaked = hurt(Bench(settings, tmp_path / "runs"), 8, seed=seed, tell=print)
    assert soaked.outcome.problems == []
    assert (soaked.outcome.replay_mismatches, soaked.outcome.sample_errors) == (0, 0)
    assert 0 < soaked.goodput < 1
