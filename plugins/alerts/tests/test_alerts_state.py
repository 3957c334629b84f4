"""What alerts save in a checkpoint: a resumed run, and one that was rolled back, tells what it would have."""

import json

from nanotrain_alerts import AlertRule, AlertsConfig, Target
from nanotrain_alerts.alerts import Alerts

from nanotrain_core.api.torch import MetricsReport
from nanotrain_core.testing import Case
from nanotrain_core.testing.probe import make_engine

WAVES = """
import attrs
from nanotrain_core.api import Component, Metric, Rule, hookimpl
from nanotrain_core.api.torch import Monitor, Rollback

@attrs.define(frozen=True, kw_only=True)
class Config:
    "Of a test."
    back_at: int = 0

METRIC = Metric(name="wave/height", unit="1", group="wave", summary="of a test", rule=Rule(warn_times=2))

@hookimpl
def nanotrain_register_monitor(register):
    register(Component(name="waves", config=Config, factory=f"{__name__}:Waves", metrics=(METRIC,)))

class Waves(Monitor):
    def __init__(self, config):
        self.config, self.went = config, False

    def on_start(self, run):
        self.run = run

    def on_step(self, report):
        self.run.metrics.scalar("wave/height", 3.0 if report.step >= 6 else 1.0)
        if report.step == self.config.back_at and not self.went:
            self.went = True
            return Rollback(8, "a test")
"""


def test_what_is_usual_and_how_long_a_rule_has_held_outlasts_a_resume_and_a_rollback(tmp_path, monkeypatch):
    """They were lost: the resumed run took what was wrong for usual, and told nothing more."""
    monkeypatch.setattr("nanotrain_core.metrics.baseline.BASELINE_COUNT", 4)
    (tmp_path / "waves.py").write_text(WAVES)
    rule = {"metric": "wave/*", "verdict": "warn", "in_a_row": 3}

    def alerts(name, steps, back_at=0, **resume):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        monitors = [
            {"use": "waves", "back_at": back_at},
            {"use": "alerts", "rules": [rule], "every_minutes": 0.0, "to": {"file": "alerts.jsonl"}},
        ]
        case = Case("monitor", use="waves", plugins=(str(tmp_path / "waves.py"),))
        changes = {"run": {"steps": steps, "log_every": 1}, "monitor": monitors, "checkpoint": {"every": 7}}
        make_engine(case, changes, folder=folder, **resume).fit()
        file = folder / "alerts.jsonl"
        rows = map(json.loads, file.read_text().splitlines() if file.exists() else ())
        return [(row["step"], row["value"], row["text"].partition(", step ")[2]) for row in rows]

    through = alerts("through", 10)
    assert [row[:2] for row in through] == [(8, 3.0), (9, 3.0), (10, 3.0)]
    assert alerts("twice", 7) == []
    assert alerts("twice", 10, resume="latest") == through
    assert alerts("back", 10, back_at=9) == through * 2  # it goes back when the next step is done


def test_a_rule_that_was_moved_goes_on_and_another_does_not(tmp_path):
    secret = Target(webhook="https://hooks.example/S3CRET")
    rules = [AlertRule(metric="a", above=0.0, in_a_row=3, to=secret), AlertRule(metric="b", above=0.0)]
    before = Alerts(AlertsConfig(rules=tuple(rules)))
    before.judge(MetricsReport(1, {"a": 1.0, "b": 1.0}))
    assert "S3CRET" not in str(before.meta())
    other = [AlertRule(metric="b", above=9.0), AlertRule(metric="a", above=0.0, in_a_row=2)]
    after = Alerts(AlertsConfig(rules=tuple(other)))
    after.load_meta(json.loads(json.dumps(before.meta())))
    found = after.judge(MetricsReport(2, {"a": 1.0, "b": 1.0}))
    assert {number: [each.text for each in held] for number, held in found.items()} == {
        1: ["a is 1, above 0, 2 in a row"]
    }
