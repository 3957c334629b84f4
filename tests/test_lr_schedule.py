"""Learning-rate factors against values worked out by hand."""

import math

import pytest
import torch

from nanotrain_core.optim.lr_schedule import factor, lr_scheduler
from nanotrain_core.recipe.tree import LRScheduleConfig


def rates(config: LRScheduleConfig, steps: int) -> list[float]:
    at = factor(config, steps)
    return [at(done) for done in range(steps)]


def test_constant_rises_to_one_and_stays():
    assert rates(LRScheduleConfig(use="constant", warmup_steps=4), 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_falls_in_equal_steps_to_the_final_ratio_just_after_the_run():
    config = LRScheduleConfig(use="linear", warmup_steps=0, final_ratio=0.5)
    assert rates(config, 4) == [1.0, 0.875, 0.75, 0.625]
    assert factor(config, 4)(4) == 0.5


def test_cosine_is_halfway_in_the_middle_of_its_decay():
    config = LRScheduleConfig(use="cosine", warmup_steps=2, final_ratio=0.1)
    found = rates(config, 12)
    assert found[:3] == [0.5, 1.0, 1.0]
    assert found[7] == pytest.approx(0.1 + 0.9 * 0.5)
    assert found[11] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 0.9)) / 2)


def test_wsd_stays_at_the_peak_until_its_decay_steps():
    config = LRScheduleConfig(use="wsd", warmup_steps=1, decay_steps=4)
    assert rates(config, 8) == [1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]


def test_wsd_decays_over_a_tenth_of_the_run_if_not_told():
    assert rates(LRScheduleConfig(use="wsd"), 40)[-4:] == [1.0, 0.75, 0.5, 0.25]


def test_wsd_decays_in_a_short_run_too():
    assert rates(LRScheduleConfig(use="wsd"), 5) == [1.0, 1.0, 1.0, 1.0, 0.5]


@pytest.mark.parametrize("use", ["constant", "linear", "cosine", "wsd"])
def test_a_resumed_scheduler_continues_the_same_rates(use):
    config = LRScheduleConfig(use=use, warmup_steps=3, final_ratio=0.1)

    def run(done: int) -> list[float]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
        scheduler = lr_scheduler(optimizer, config, 10, done=done)
        found = []
        for _ in range(10 - done):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return found

    assert run(6) == run(0)[6:]


@pytest.mark.filterwarnings("error")
def test_moving_on_after_a_skipped_first_step_is_no_mistake():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = lr_scheduler(optimizer, LRScheduleConfig(use="linear"), 4)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.75
