"""All sinks at once change no bit of a run."""

import json

import pytest

from nanotrain_core.contracts import Monitor
from nanotrain_core.metrics.history import read_metrics
from nanotrain_core.testing import Case
from nanotrain_core.testing.probe import make_engine

SINKS = [
    {"use": "console"},
    {"use": "jsonl"},
    {"use": "tensorboard"},
    {"use": "wandb", "mode": "offline"},
    {"use": "alerts", "rules": [{"metric": "loss", "above": 0.0}], "to": {"file": "alerts.jsonl"}},
]


class Bits(Monitor):
    """Keeps the bits of all that a step tells but times."""

    def __init__(self):
        self.bits = []

    def on_step(self, report):
        self.bits.append((report.step, report.loss.hex(), report.grad_norm.hex(), report.lr.hex()))


@pytest.fixture
def _offline(monkeypatch):
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


@pytest.mark.usefixtures("_offline")
def test_a_run_has_the_same_bits_with_all_sinks_and_with_none(tmp_path):
    runs = {}
    for name, monitors in (("none", []), ("all", SINKS)):
        bits, folder = Bits(), tmp_path / name
        folder.mkdir()
        changes = {"run": {"steps": 5}, "evaluation": {"every": 2, "sequences": 4}, "monitor": monitors}
        case = Case("parallel", use="ddp")
        engine = make_engine(
            case, {**changes, "checkpoint": {"use": "simple"}}, callbacks=[bits], folder=folder
        )
        engine.fit()
        weights = {p.placement.name: p.parameter.detach().clone() for p in engine.run.placed}
        runs[name] = bits.bits, weights
    (bits, weights), (others, twins) = runs.values()
    assert bits == others
    assert all(weights[name].equal(twins[name]) for name in weights)
    written = tmp_path / "all"
    assert [step for step, _ in read_metrics(written).curves["loss"]] == [1, 2, 3, 4, 5]
    assert (
        len([*written.glob("tensorboard/events*")])
        == len([*written.glob("wandb/offline-run-*/*.wandb")])
        == 1
    )
    (alert,) = map(json.loads, (written / "alerts.jsonl").read_text().splitlines())
    assert (alert["metric"], alert["step"]) == ("loss", 1)
