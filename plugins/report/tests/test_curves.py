"""What becomes of curves before they are drawn: families, fewer points, medians, bad stretches."""

import math

import numpy as np
import pytest
from made_up import DECLARED
from nanotrain_report.families import Line, families
from nanotrain_report.health import Judging, baselines, judge, stretches, told
from nanotrain_report.sampling import MOST_POINTS, grid, narrow, smooth, thin

from nanotrain_core.api import CORE_METRICS, Curve, Metric, Rule


def curve(values, steps=None):
    found = Curve()
    for step, value in zip(steps or range(1, len(values) + 1), values, strict=True):
        found.add(step, value)
    return found


def line(values, name="x", steps=None):
    steps = np.arange(1, len(values) + 1) if steps is None else np.array(steps)
    return Line(name, name, steps, np.array(values, dtype=float))


def family(rule, values):
    metric = Metric(name="x", unit="1", group="g", summary="", rule=rule)
    return families({"x": curve(values)}, [metric])[0]


@pytest.mark.parametrize("count", [1, 999, 1000, 1001, 12_345])
def test_fewer_points_keep_every_extreme_and_every_hole(count):
    random = np.random.default_rng(count)
    values = random.standard_normal(count)
    for place in random.integers(0, count, 5):  # single points that a mean would lose
        values[place] = 50 * random.standard_normal()
    if count > 1:
        values[random.integers(0, count)] = np.nan
    steps = 10 * np.arange(count)
    kept, values_kept = thin(steps, values)
    assert len(kept) <= MOST_POINTS
    assert (np.diff(kept) > 0).all()
    np.testing.assert_array_equal(values_kept, values[kept // 10])  # real points at their own steps
    assert (kept[0], kept[-1]) == (steps[0], steps[-1])
    assert np.nanmax(values_kept) == np.nanmax(values)
    assert np.nanmin(values_kept) == np.nanmin(values)
    assert np.isnan(values_kept).any() == np.isnan(values).any()
    for first in range(0, count - 150, 150):  # also of every part of it, to within a few points
        around = (kept >= steps[first] - 700) & (kept <= steps[first + 150] + 700)
        assert np.nanmax(values_kept[around]) >= np.nanmax(values[first : first + 150])


def test_values_that_float32_cannot_hold_stay_float64():
    assert narrow(np.array([1.0, math.nan, math.inf])).dtype == np.float32
    kept = narrow(np.array([1.0, math.nan, 2e60]))
    assert kept.dtype == np.float64
    assert kept[2] == 2e60


def test_the_running_median_lags_behind_nothing_and_passes_by_a_spike():
    slope = np.arange(200.0)
    np.testing.assert_allclose(smooth(slope, 21), slope)
    spiked = np.ones(200)
    spiked[77], spiked[120] = 1e6, np.nan
    np.testing.assert_allclose(smooth(spiked, 9), 1.0)
    assert np.isnan(smooth(np.full(9, np.nan), 5)).all()


def test_a_cell_of_a_heat_map_has_the_largest_value_of_its_steps():
    steps = np.arange(1, 1001)
    values = np.zeros(1000)
    values[612] = 7.0
    cells, edges = grid([line(values, steps=steps), line(np.full(500, np.nan), steps=steps[:500])])
    column = np.searchsorted(edges, 613, side="right") - 1
    assert cells[0].max() == cells[0, column] == 7.0
    assert np.isnan(cells[1]).all()
    assert grid([line(-values, steps=steps)], lowest=True)[0].min() == -7.0


def test_curves_are_together_with_those_of_their_declaration():
    names = [f"gradients/norm/layers.{n}.q" for n in (10, 2)] + ["loss", "strange/a", "strange/b"]
    found = families({name: curve([1.0]) for name in names}, [*CORE_METRICS, *DECLARED])
    by_name = {each.metric.name: each for each in found}
    assert [each.label for each in by_name["gradients/norm/{parameter}"].lines] == [
        "layers.2.q",
        "layers.10.q",
    ]
    assert by_name["gradients/norm/{parameter}"].title == "gradients/norm"
    assert [each.label for each in by_name["strange/{name}"].lines] == ["a", "b"]
    assert by_name["strange/{name}"].metric.group == "undeclared"
    assert found[0].metric.name == "loss"  # the core's come first


def test_a_stretch_has_the_steps_at_which_a_rule_was_not_kept():
    rule = Rule(warn_above=3, bad_above=10, high="too much", warn_below=0.5, low="too little")
    values = [1, 4, 1, 12, 1, 1, 1, 1, 0.1, 0.2, math.nan]
    high, broken, low = stretches(family(rule, values), Judging(patience=1))
    assert (high.first, high.last, high.count, high.verdict, high.worst) == (2, 4, 2, "bad", 12)
    assert high.sentence == "Too much (x is 12)"
    assert not high.goes_on
    assert (low.first, low.last, low.verdict, low.worst, low.goes_on) == (9, 10, "warn", 0.1, False)
    assert low.sentence == "Too little (x is 0.1)"
    assert (broken.first, broken.last, broken.verdict, broken.goes_on) == (11, 11, "bad", True)
    assert stretches(family(None, values), Judging()) == []


def test_a_sentence_that_begins_with_a_name_keeps_it():
    declared = Metric(
        name="norms/{norm}",
        unit="1",
        group="weights",
        summary="",
        rule=Rule(warn_above=1, high="{where} is large"),
    )
    for layer, wanted in (("layers.0.ffn_norm", "layers.0.ffn_norm is large"), ("embed", "embed is large")):
        (family,) = families({f"norms/{layer}": curve([2.0, 2.0])}, [declared])
        assert stretches(family, Judging(patience=1))[0].sentence.startswith(wanted)


def test_layers_that_are_wrong_together_are_one_sentence():
    rule = Rule(warn_above=1, high="{where} is {value}")
    metric = Metric(name="rms/{block}", unit="1", group="g", summary="", rule=rule)
    curves = {f"rms/layers.{n}": curve([0, 2 + n, 2, 0]) for n in range(3)}
    (found,) = stretches(families(curves, [metric])[0], Judging(patience=1))
    assert found.sentence == "layers.2 (and 2 more) is 4"
    assert (found.first, found.last, found.count) == (2, 3, 6)


def test_values_are_judged_as_their_rule_does():
    random = np.random.default_rng(0)
    values = 10 ** random.uniform(-3, 3, 300)
    values[[7, 100, 200]] = math.nan, math.inf, -math.inf
    for rule in (
        Rule(warn_below=0.1, bad_below=0.01, warn_above=10, bad_above=100),
        Rule(warn_times=2, bad_times=20, bad_below=0.002),
    ):
        baseline = baselines(rule, values)
        marks, _ = judge(rule, values, baseline)
        told = [None if math.isnan(each) else each for each in baseline.tolist()]
        expected = [rule.judge(*pair) for pair in zip(values.tolist(), told, strict=True)]
        assert [("good", "warn", "bad")[mark] for mark in marks] == expected


def test_statistics_of_a_tensor_are_families_apart():
    metric = Metric(name="weights/{statistic}/{parameter}", unit="1", group="weights", summary="")
    names = [f"weights/{statistic}/{name}" for statistic in ("norm", "mean") for name in "ab"]
    found = families({name: curve([1.0]) for name in names}, [metric])
    assert [each.metric.name for each in found] == ["weights/norm/{parameter}", "weights/mean/{parameter}"]
    assert [line.label for line in found[0].lines] == ["a", "b"]


def test_a_number_of_each_rank_is_one_family():
    """As ``rank_metrics`` declares it: maximum, mean, lower median, and the rank with the maximum."""
    rule = Rule(warn_above=5, high="full")
    metrics = [
        Metric(
            name=f"memory/host/{over}",
            unit="MiB",
            group="memory",
            summary="",
            rule=rule if over == "max" else None,
        )
        for over in ("max", "mean", "median", "rank")
    ]
    curves = {metric.name: curve([n + 6.0]) for n, metric in enumerate(metrics)}
    (found,) = families(curves, metrics)
    assert found.metric.name == "memory/host/{over}"
    assert [line.label for line in found.lines] == ["max", "mean"]
    assert [each.names for each in stretches(found, Judging(patience=1))] == [
        ("memory/host/max",)
    ]  # a mean breaks no rule


def test_equal_texts_in_a_row_are_one():
    assert told([(1, "a"), (2, "a"), (3, "b"), (4, "a")]) == [(1, 2, "a"), (3, 3, "b"), (4, 4, "a")]
