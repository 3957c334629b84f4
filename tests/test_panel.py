"""What a panel of a run says in which line."""

import math
from itertools import pairwise, product

import attrs
import pytest
from panels import Clock, Trained, report, shown

from nanotrain_core.builtin.configs import ConsoleConfig
from nanotrain_core.contracts import EvaluationReport, MetricsReport
from nanotrain_core.monitors.console import Console as ConsoleMonitor
from nanotrain_core.monitors.lines import SinceLine
from nanotrain_core.monitors.panel import bar, clock_time
from nanotrain_core.monitors.sparkline import MOST, Points, sparkline


@pytest.fixture
def panel():
    return Trained("laptop", 500, memory=lambda: "memory 12.3 of 141 GB", clock=Clock())


def test_a_line_has_the_mean_of_all_steps_since_the_line_before():
    """Reports of steps 4, 6 and 7, after a line for step 3, of 100 tokens a step."""
    since = SinceLine(3)
    for step, seconds in ((4, 1.0), (6, 2.0), (7, 4.0)):
        since.add(last := attrs.evolve(report(step, 1.0, seconds=seconds), tokens_per_second=100 / seconds))
    found = since.mean(last)
    assert found.seconds == (1.0 + 2 * 2.0 + 4.0) / 4
    assert found.tokens_per_second == pytest.approx(400 / 9)
    assert attrs.evolve(found, seconds=4.0, tokens_per_second=25.0) == last


def test_a_line_over_a_border_of_phases_has_the_mean_flops_of_a_token():
    """A step of 100 tokens at 10 FLOPs each, then one of 300 at 30."""
    since = SinceLine(0)
    for step, (tokens, flops) in enumerate([(100.0, 10.0), (300.0, 30.0)], 1):
        last = report(step, 1.0, seconds=2.0)
        since.add(last := attrs.evolve(last, tokens_per_second=tokens / 2, flops_per_token=flops))
    assert since.mean(last).flops_per_token == (100 * 10 + 300 * 30) / 400


def test_a_panel_says_what_matters_in_lines_of_their_own(panel):
    panel.run(100, losses={"lm": 0.07, "mtp": 0.01})
    panel.evaluated(EvaluationReport(50, 3.5, 1.5, 9))
    panel.evaluated(EvaluationReport(100, 4.0, 1.75, 9))
    panel.saved_now(90)
    panel.clock.now += 65
    panel.health = "step 100: gradients are very large: lower lr."
    head, loss, validation, *rest = shown(panel, 120)
    assert head == "laptop      " + "━" * 8 + "━" * 32 + "  100/500  3:20 left"
    assert loss.startswith("loss        0.0800    ██▇")
    assert loss.endswith("▁  lm 0.0700   mtp 0.0100")
    assert validation.startswith("validation  4.0000    ▁█ ")
    assert validation.endswith("at step 100   1.7500 bits/byte   best 3.5000 at step 50")
    assert rest == [
        "speed       12,346 tokens/s   83 ms/step   MFU 42.0%   memory 12.3 of 141 GB",
        "update      grad norm 1.250   lr 3.00e-04",
        "saved       step 90   1:05 ago",
        "health      step 100: gradients are very large: lower lr.",
    ]


def test_it_shows_what_every_monitor_says_of_health(panel):
    """A slow rank, said as ``health/stragglers``, was not shown."""
    console = ConsoleMonitor(ConsoleConfig())
    console.panel = panel
    panel.run(1)
    console.on_metrics(MetricsReport(1, {}, texts={"health/stragglers": "rank 3 is slow.", "x": "other"}))
    assert shown(panel)[-1] == "health      rank 3 is slow."
    console.on_metrics(MetricsReport(2, {}, texts={"health": "step 1: bad.", "health/stragglers": "rank 3."}))
    assert shown(panel)[-1] == "health      step 1: bad. rank 3."
    console.on_metrics(MetricsReport(3, {}, texts={"healthy": "other"}))
    assert shown(panel)[-1] == "health      step 1: bad. rank 3."


def test_what_is_said_of_health_has_three_lines_at_most(panel):
    panel.run(1)
    panel.health = "step 1: " + "gradients are very large: lower lr. " * 8
    *_, first, second, third = shown(panel, 60)
    assert first.startswith("health      step 1: gradients are very large")
    assert second.startswith(" " * 12)
    assert third.endswith(" ...")
    panel.health = ""
    assert shown(panel, 60)[-1].startswith("update")


@pytest.mark.parametrize("ascii_only", [False, True])
def test_a_panel_fits_every_terminal(panel, ascii_only):
    for last, first in ((0, 1), (30, 1), (700, 31)):
        panel.run(last, first=first)
        panel.evaluated(EvaluationReport(max(1, last), 3.5, None, 9))
        for width, height in product((1, 2, 5, 13, 20, 30, 40, 80, 200), (2, 4, 25)):
            lines = panel.lines(width, height, ascii_only=ascii_only)
            assert 0 < len(lines) < height
            assert all(line.cell_len < max(2, width) for line in lines)
            assert not ascii_only or all(line.plain.isascii() for line in lines)


def test_before_the_first_step_a_panel_says_what_everybody_waits_for(panel):
    panel.phase = lambda: "forward and backward"
    shown(panel)
    panel.clock.now += 12
    (head,) = shown(panel)
    assert head.endswith("first step 12s")
    panel.phase = lambda: "evaluation"
    shown(panel)
    panel.clock.now += 3
    assert shown(panel)[0].endswith("evaluating 3s")


def test_a_long_checkpoint_is_said_and_a_short_one_is_not(panel):
    panel.run(4)
    panel.phase = lambda: "checkpoint"
    assert shown(panel)[0].endswith("4/500  4:08 left")
    panel.clock.now += 2
    assert shown(panel)[0].endswith("saving a checkpoint 2s")


def test_the_time_left_counts_what_is_no_training_and_begins_anew_after_a_rollback(panel):
    panel.run(10, seconds=1.0)
    panel.clock.now += 90.0  # an evaluation
    panel.run(11, first=11, seconds=1.0)
    assert panel.seconds_left() == pytest.approx((10 + 90) / 10 * 489)
    panel.rolled_back()
    assert panel.seconds_left() is None


def test_a_history_keeps_old_and_new_values_alike_in_bounded_memory():
    points = Points()
    for number in range(10 * MOST):
        points.add(float(number))
        assert len(points.values) < MOST
    steps = {round(b - a, 3) for a, b in pairwise(points.values)}
    assert steps == {16.0}
    assert points.recent()[0] == pytest.approx(5 * MOST, rel=0.05)


def test_a_sparkline_has_values_of_every_sort():
    assert sparkline([], 5) == ""
    assert sparkline([1.0, 1.0], 5) == "▁▁"
    assert sparkline([math.nan, 0.0, 7.0, math.inf], 4) == "!▁█!"
    assert sparkline([0.0, 2.0, 4.0, 6.0], 2) == "▁█"
    assert sparkline([0, 1], 2, ascii_only=True) == "_@"


def test_bars_and_times():
    assert [bar(x, 4).plain for x in (0.0, 0.125, 0.5, 2.0)] == ["━━━━", "╸━━━", "━━━━", "━━━━"]
    assert bar(0.5, 4, ascii_only=True).plain == "##.."
    assert [clock_time(x) for x in (0, 59.6, 3599, 7200, 200000)] == [
        "0s",
        "1:00",
        "59:59",
        "2:00:00",
        "2d 7h",
    ]
