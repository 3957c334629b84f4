"""What a metric declares of itself: which names it fits, its bins, and the rule that judges its values."""

import math

import pytest
from declared_metric import metric

from nanotrain_core.errors import PluginError
from nanotrain_core.metrics.declared import Bins, Names, Rule, check_distinct, may_name


def test_the_nearest_declaration_of_a_name_is_its_own_before_a_pattern():
    names = Names([metric("a/{x}"), metric("a/b", unit="s"), metric("{x}/norm")])
    assert names.find("a/b").unit == "s"
    assert names.find("a/layers.0.q").name == "a/{x}"
    assert names.find("a/b/c") is None
    assert names.near("a/norms") == " (did you mean '{x}/norm'?)"


@pytest.mark.parametrize(
    ("pattern", "declared", "fits"),
    [
        ("loss", "loss", True),
        ("loss", "losses/{term}", False),
        ("losses/*", "losses/{term}", True),
        ("losses/lm", "losses/{term}", True),
        ("losses/lm/x", "losses/{term}", False),
        ("losses/", "losses/{term}", False),
        ("*norm*", "gradients/{what}/{parameter}", True),
        ("gradients/norm/layers.*.q?", "gradients/norm/{parameter}", True),
        ("gradients/[mn]*/x", "gradients/norm/{parameter}", True),
        ("gradients/[ab]*/x", "gradients/norm/{parameter}", False),
        ("*", "loss", True),
    ],
)
def test_a_pattern_fits_what_names_a_declaration_may_have(pattern, declared, fits):
    assert may_name(pattern, declared) is fits


def test_a_rule_judges():
    rule = Rule(warn_below=1e-7, warn_above=1e-1, bad_above=3e-1)
    verdicts = [rule.judge(x) for x in (1e-8, 1e-3, 0.2, 0.4, math.nan, math.inf)]
    assert verdicts == ["warn", "good", "warn", "bad", "bad", "bad"]
    assert str(rule) == "warn below 1e-07, warn above 0.1, bad above 0.3"


@pytest.mark.parametrize("name", ["", "/a", "a//b", "a b", "a/{}", "a/{x y}", 3])
def test_a_name_has_words_between_slashes(name):
    with pytest.raises(PluginError, match="no metric's name"):
        metric(name)


def test_logarithmic_bins_have_equal_ratios():
    edges = Bins(low=1e-3, high=1e3, count=6, log=True).edges
    assert edges == pytest.approx([1e-3, 1e-2, 1e-1, 1, 10, 100, 1e3])


@pytest.mark.parametrize(
    "names",
    [("x/{statistic}", "x/rms"), ("x/{statistic}/{layer}", "x/norm/{block}"), ("x", "x"), ("{a}/x", "{b}/x")],
)
def test_two_declarations_of_one_name_are_refused(names):
    with pytest.raises(PluginError, match="both declare"):
        check_distinct([metric(name) for name in names])
    check_distinct([metric("x/{statistic}"), metric("x/other"), metric("{a}/x")])


@pytest.mark.parametrize(
    ("rule", "value", "baseline", "verdict", "says"),
    [
        (Rule(warn_above=3, high="{times} times too large"), 12.0, None, "warn", True),
        (Rule(warn_below=2, low="{times} times too small"), 0.5, None, "warn", True),
        (Rule(warn_times=2, high="{times} times as long"), 8.0, 2.0, "warn", True),
        (Rule(bad_times=3, high="{times} times as long"), 8.0, 2.0, "bad", True),
        (Rule(warn_times=2, high="{times} times as long"), 8.0, None, "good", False),
    ],
)
def test_a_rule_says_by_how_much(rule, value, baseline, verdict, says):
    assert rule.judge(value, baseline) == verdict
    if says:
        assert rule.say("x", value, baseline=baseline).startswith("4 times")


def test_a_sentence_has_its_place_and_number_in_any_case():
    rule = Rule(warn_above=1, high="{where} is slow")
    assert rule.say("a/layers.3", 2.0, where="layers.3") == "layers.3 is slow (a/layers.3 is 2)"
    assert Rule(bad_above=1).say("a/b", 2.0) == "a/b is 2: expected otherwise, bad above 1"
