"""Metrics that follow from others of a step, and those that the last evaluation publishes."""

import pytest
import torch
from declared_metric import metric

from nanotrain_core.contracts import Monitor
from nanotrain_core.errors import PluginError
from nanotrain_core.metrics.declared import Rule
from nanotrain_core.testing import Case
from nanotrain_core.testing.probe import make_engine

DDP = Case("parallel", use="ddp", topology={"dp": 2})


class Derives(Monitor):
    """Publishes two metrics and derives from them, and at the end publishes once more."""

    declared = (metric("a"), metric("b"), metric("ratio", rule=Rule(warn_above=1)), metric("late"))

    def __init__(self, name="ratio"):
        self.name, self.told = name, []

    def on_start(self, run):
        self.metrics = run.metrics

    def on_before_update(self, update):
        self.metrics.scalar("a", 6.0)
        self.metrics.scalar("b", torch.tensor(2.0))

    def derive(self, report):
        return {self.name: report.values["a"] / report.values["b"]} if "a" in report.values else {}

    def on_evaluation(self, report):
        self.metrics.scalar("late", report.loss)

    def on_metrics(self, report):
        self.told.append(report)


def test_what_is_derived_is_told_as_if_it_were_published():
    monitor = Derives()
    make_engine(DDP.alone(), {"run": {"steps": 1}}, callbacks=[monitor]).fit()
    (report,) = monitor.told
    assert report.values["ratio"] == 3.0
    assert "ratio" in report.published
    assert report.metrics["ratio"].rule.judge(3.0) == "warn"


@pytest.mark.parametrize(
    ("name", "text"), [("ration", "which it does not declare .did you mean 'ratio'"), ("a", "already")]
)
def test_what_is_derived_has_a_declared_name_of_its_own(name, text):
    with pytest.raises(PluginError, match=text):
        make_engine(DDP.alone(), {"run": {"steps": 1}}, callbacks=[Derives(name)]).fit()


def test_what_the_last_evaluation_publishes_is_told_at_the_end():
    monitor = Derives()
    changes = {"run": {"steps": 2}, "evaluation": {"every": 2, "sequences": 8}}
    make_engine(DDP.alone(), changes, callbacks=[monitor]).fit()
    first, *_, evaluated, last = monitor.told
    assert first.step == 0
    assert last.step == 2
    assert last.values == {"late": evaluated.values["validation/loss"]}
