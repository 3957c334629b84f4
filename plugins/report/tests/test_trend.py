"""The course of a noisy loss is told as what it is, whatever the single batches were."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from made_up import MadeUp
from nanotrain_report.families import Line
from nanotrain_report.folder import open_run
from nanotrain_report.trend import noise, trend_of
from nanotrain_report.verdict import learning

SEEDS = 200


def said(course, sigma, count=2000):
    """Count the answers about so many losses that follow a course over [0, 1] with normal noise."""
    found, steps = Counter(), np.arange(1, count + 1)
    for seed in range(SEEDS):
        losses = course(np.linspace(0, 1, count)) + np.random.default_rng(seed).normal(0, sigma, count)
        lines = {"loss": Line("loss", "loss", steps, losses)}
        answer = learning(SimpleNamespace(unmeasured=False, lines=lines, line=lines.get))
        found[answer.headline.partition(" since")[0]] += 1
    return found


@pytest.mark.parametrize(
    ("course", "sigma", "right"),
    [
        (lambda t: 2.5 - 0.3 * t, 0.15, "Yes"),
        (lambda t: 2.2 + 3.4 * np.exp(-6 * t) - 0.15 * t, 0.1, "Yes"),
        (lambda t: 2.2 + 3.4 * np.exp(-40 * t), 0.1, "Yes, but it has levelled off"),
        (lambda t: 2.5 + 0 * t, 0.15, "No: the loss has not fallen"),
        (lambda t: 2.2 + 0.3 * t, 0.15, "No: the loss has risen"),
        (lambda t: 2.0 + 2 * np.abs(t - 0.6), 0.15, "It has got worse"),
        (lambda t: 2.5 - 0.3 * t + 2.0 * (t > 0.96), 0.15, "It has got worse"),
    ],
    ids=["fine-tuned", "pretrained", "levelled", "flat", "rises", "turned", "jumped"],
)
def test_a_noisy_loss_is_judged_by_its_course(course, sigma, right):
    found = said(course, sigma)
    assert found[right] >= 0.95 * SEEDS, found


@pytest.mark.parametrize("count", [10, 20, 100])
def test_few_noisy_steps_of_a_loss_that_does_not_rise_are_no_bad_news(count):
    for slope in (0.0, -0.3):
        found = said(lambda t, slope=slope: 2.5 + slope * t, 0.15, count)
        wrong = found["No: the loss has risen"] + found["It has got worse"]
        assert wrong <= 0.1 * SEEDS if count == 10 else wrong <= 0.04 * SEEDS, found


def test_noise_is_measured_around_a_course():
    random = np.random.default_rng(0)
    steps = np.linspace(0, 1, 5000)
    values = 2.0 + 3.0 * np.exp(-4 * steps) + random.normal(0, 0.1, 5000)
    values[::500] += 50.0
    assert noise(values) == pytest.approx(0.1, rel=0.05)
    assert noise(5.0 - steps) == pytest.approx(0.0, abs=1e-12)
    assert noise(values[:2]) == 0.0


def test_the_best_of_a_loss_without_noise_is_its_smallest_value():
    values = np.array([3.0, 2.5, 2.2, 2.4, 2.6, 2.7])
    found = trend_of(10 * np.arange(6), values, noisy=False)
    assert (found.first, found.now, found.best, found.best_step) == (3.0, 2.7, 2.2, 20)
    assert found.worse
    assert found.fell
    assert not found.falls


@pytest.mark.parametrize(
    ("held", "headline"),
    [
        (((1, 3.0), (1990, 2.0)), "Yes"),
        (((1, 3.0), (900, 2.0)), "Yes, but it has levelled off"),  # nobody knows of the last steps
        (((1, 3.0), (1800, 2.0), (1990, 2.1)), "Yes, but it has levelled off"),
    ],
    ids=["falls", "old", "rises"],
)
def test_a_flat_training_loss_is_not_levelled_off_while_validation_falls(tmp_path, held, headline):
    run = MadeUp(tmp_path, steps=2000)
    run.start()
    random, held = np.random.default_rng(1), dict(held)
    for step in range(1, 2001):
        run.step(step, loss=2.2 + 3.4 * np.exp(-step / 20) + random.normal(0, 0.05))
        if step in held:
            run.row("evaluation", step=step, loss=held[step], bits_per_byte=None, tokens=1)
    found = learning(open_run(run.write()))
    assert (found.status, found.headline) == ("good", headline)
    assert ("what still falls is validation loss" in found.detail) == (headline == "Yes")
    assert f"Validation loss went from 3 to {list(held.values())[-1]:g}." in found.detail
