"""What is wrong is said once when it begins and once when it ends; what is only noise is not."""

import json
import math

import pytest
import structlog
from nanotrain_health.diagnosis import Diagnosis

from nanotrain_core.api import BASELINE_COUNT, Metric, Rule
from nanotrain_core.api.torch import MetricsReport

SPEED = Metric(
    name="speed/{rank}",
    unit="tokens/s",
    group="speed",
    summary="",
    rule=Rule(warn_below=10, bad_below=1, low="{where} is slow: look at its data"),
)
SECONDS = Metric(
    name="seconds",
    unit="s",
    group="time",
    summary="",
    rule=Rule(warn_times=2, high="steps take {times} times as long as usual"),
)


def judged(diagnosis, metric, values, name=None):
    """Return by step what is said when a metric has these values, step after step."""
    name = name or metric.name
    reports = [MetricsReport(n, {name: x}, metrics={name: metric}) for n, x in enumerate(values, 1)]
    told = {report.step: [each.text for each in diagnosis.judge(report)] for report in reports}
    return {step: said for step, said in told.items() if said}


def test_a_trouble_is_said_once_when_it_has_lasted_and_once_when_it_has_been_away():
    values = [20, *[5] * 9, *[20] * 9, *[5] * 3, 20, 20]
    assert judged(Diagnosis(patience=3), SPEED, values, "speed/3") == {
        4: ["step 4: 3 is slow: look at its data (speed/3 is 5)."],
        13: ["step 13: this is over: 3 is slow (said at step 4)."],
        22: ["step 22: 3 is slow: look at its data (speed/3 is 5)."],
    }


def test_what_is_over_is_no_warning():
    diagnosis = Diagnosis(patience=1)
    for value, level in ((5, "warning"), (20, "info")):
        with structlog.testing.capture_logs() as logged:
            report = MetricsReport(1, {"speed/3": value}, metrics={"speed/3": SPEED})
            diagnosis.log(diagnosis.judge(report), 1, shown=True)
        assert [each["log_level"] for each in logged] == [level]


def test_a_value_that_comes_and_goes_says_nothing_and_ends_nothing():
    assert not judged(Diagnosis(patience=3), SPEED, [5, 5, 20] * 9, "speed/3")
    said = judged(Diagnosis(patience=3), SPEED, [5, 5, 5, *[20, 20, 5] * 5], "speed/3")
    assert list(said) == [3]


@pytest.mark.parametrize(("value", "step"), [(0.5, 2), (math.nan, 1)])
def test_what_is_bad_is_said_sooner(value, step):
    assert list(judged(Diagnosis(patience=5), SPEED, [value] * 9, "speed/0")) == [step]


def test_all_layers_of_a_metric_make_one_sentence_of_the_worst():
    names = [f"speed/{rank}" for rank in range(4)]
    values = dict(zip(names, (20, 4, 3, 6), strict=True))
    report = MetricsReport(1, values, metrics=dict.fromkeys(names, SPEED))
    (said,) = Diagnosis(patience=1).judge(report)
    assert said.text == "step 1: 2 (and 2 more) is slow: look at its data (speed/2 is 3)."


def test_a_rule_relative_to_the_usual_waits_until_that_is_known():
    usual = [1.0, 1.2, 0.8] * (BASELINE_COUNT // 3)
    assert not judged(Diagnosis(patience=1), SECONDS, [*usual[1:], 5.0])
    said = judged(Diagnosis(patience=1), SECONDS, [*usual, 5.0])
    assert said == {BASELINE_COUNT + 1: [f"step {BASELINE_COUNT + 1}: steps take 5 times as long as usual."]}


@pytest.mark.parametrize("resumed_at", [None, 70, 150])
def test_what_lasts_is_not_over_and_does_not_become_the_usual(resumed_at):
    """The usual had slid along: 53 steps after it began it was said to be over."""
    values, diagnosis, said = [*[1.0] * 61, *[3.0] * 300, *[1.0] * 9], Diagnosis(patience=5), {}
    for number, value in enumerate(values, 1):
        if number == resumed_at:
            meta, diagnosis = json.loads(json.dumps(diagnosis.meta())), Diagnosis(patience=5)
            diagnosis.load_meta(meta)
        report = MetricsReport(number, {"seconds": value}, metrics={"seconds": SECONDS})
        for each in diagnosis.judge(report):
            said[number] = each.text
    what = "steps take 3 times as long as usual"
    assert said == {
        66: f"step 66: {what}.",
        366: f"step 366: this is over: {what} (said at step 66).",
    }


def test_what_doubles_every_100_values_is_said_once():
    said = judged(Diagnosis(patience=5), SECONDS, [2 ** (number / 100) for number in range(1000)])
    assert [*said] == [205]


def test_what_settles_while_training_begins_is_no_trouble():
    """As the residual stream of a healthy run, read in 20 steps and then every 20: 100 times in 60 steps."""
    steps = [*range(1, 21), *range(40, 3000, 20)]
    assert not judged(Diagnosis(patience=5), SECONDS, [2.5 * (1 - 0.99**step) for step in steps])


def without_steps(text):
    return text.partition(": ")[2].partition(" (said at")[0]


def test_a_resumed_diagnosis_goes_on_where_it_was():
    values = [*[1.0] * BASELINE_COUNT, *[3.0] * 4, *[1.0] * 8]
    whole = judged(Diagnosis(patience=3), SECONDS, values)
    assert len(whole) == 2
    for at in (5, BASELINE_COUNT + 1, BASELINE_COUNT + 3, BASELINE_COUNT + 5):
        first, second = Diagnosis(patience=3), Diagnosis(patience=3)
        said = [text for texts in judged(first, SECONDS, values[:at]).values() for text in texts]
        second.load_meta(first.meta())
        said += [text for texts in judged(second, SECONDS, values[at:]).values() for text in texts]
        wanted = [text for texts in whole.values() for text in texts]
        assert [without_steps(text) for text in said] == [without_steps(text) for text in wanted]


def test_of_a_loss_that_is_no_number_that_alone_is_said():
    loss = Metric(name="loss", unit="nats", group="loss", summary="", rule=Rule(high="no number"))
    report = MetricsReport(
        1, {"loss": math.nan, "seconds": math.nan}, metrics={"loss": loss, "seconds": SECONDS}
    )
    (said,) = Diagnosis(patience=5).judge(report)
    assert said.text == "step 1: no number (loss is nan)."


def test_a_value_that_is_no_number_is_not_worded_as_a_size():
    names = [f"speed/{rank}" for rank in range(4)]
    report = MetricsReport(1, dict.fromkeys(names, math.nan), metrics=dict.fromkeys(names, SPEED))
    (said,) = Diagnosis(patience=5).judge(report)
    assert said.text == "step 1: speed/0 is nan, not a finite number (and 3 more)."


def test_an_infinite_loss_is_said():
    loss = Metric(name="loss", unit="nats", group="loss", summary="", rule=Rule(high="no number"))
    report = MetricsReport(1, {"loss": math.inf, "seconds": 1.0}, metrics={"loss": loss, "seconds": SECONDS})
    (said,) = Diagnosis(patience=5).judge(report)
    assert said.text == "step 1: no number (loss is inf)."


def test_an_overflow_for_which_a_loss_scale_is_there_is_none_of_the_gradients():
    gradients = Metric(name="g", unit="1", group="gradients", summary="", rule=Rule(high="large"))
    values = {"g": math.inf, "skipped": 1.0, "loss_scale": 1024.0}
    assert not Diagnosis(patience=1).judge(MetricsReport(1, values, metrics={"g": gradients}))
