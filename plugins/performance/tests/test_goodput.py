"""Where a run's hours went: entered apart, over restarts and rollbacks."""

import json
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from nanotrain_performance import GoodputConfig, goodput
from nanotrain_performance.goodput import Goodput
from nanotrain_performance.ledger import FILE, Ledger, read, write

from nanotrain_core.contracts import Monitor
from nanotrain_core.testing import Case
from nanotrain_core.testing.probe import make_engine
from nanotrain_core.watch.progress import Progress, TimeSpent

RUN = {"monitor": [{"use": "goodput"}], "checkpoint": {"every": 3, "keep": 5}}
ALONE = Case("monitor", use="goodput")


def test_a_ledger_adds_up_to_the_time_that_has_passed():
    ledger = Ledger(began=1000.0, seen=1000.0)
    ledger.pass_time(5.0, step=0, start=5.0)
    ledger.pass_time(100.0, step=10, data=20.0, evaluation=6.0, checkpoint=4.0)
    assert (ledger.wall, ledger.productive) == (105.0, 70.0)
    ledger.begin_again(now=1125.0, first_step=8)  # 20 seconds later, two steps are lost
    assert (ledger.down, ledger.restarts, ledger.lost_steps, ledger.step) == (20.0, 1, 2, 8)
    assert (ledger.productive, ledger.redone) == (pytest.approx(56.0), pytest.approx(14.0))
    ledger.pass_time(10.0, step=9)
    parts = (ledger.start, ledger.data, ledger.evaluation, ledger.checkpoint, ledger.redone, ledger.down)
    assert ledger.productive + sum(parts) == pytest.approx(ledger.wall) == 135.0


def test_what_a_device_says_late_is_taken_from_training():
    ledger = Ledger(began=0.0, seen=0.0)
    ledger.pass_time(10.0, step=1)  # of them nine without data, which the clock says a step later
    ledger.pass_time(1.0, step=2, data=9.0)
    assert (ledger.wall, ledger.productive, ledger.data) == (11.0, 2.0, 9.0)


class Clocks:
    """Times a device: its queue hides what the host waits."""

    spent: ClassVar = {"start": TimeSpent(5.0), "data": TimeSpent(4.0)}
    timed: Any = None

    def time_device(self, device):
        self.timed = device

    def measured_in(self, part):
        return {"data": TimeSpent(0.5)}[part]


def test_data_is_lost_only_while_the_device_waits(tmp_path):
    monitor, progress = Goodput(GoodputConfig()), Clocks()
    device = torch.device("cuda", 0)
    monitor.on_start(SimpleNamespace(folder=tmp_path, rank=0, first_step=0, progress=progress, device=device))
    assert progress.timed == device
    assert monitor._beside() == {"start": 5.0, "data": 0.5, "evaluation": 0.0, "checkpoint": 0.0}


def test_it_comes_back_from_its_file_and_from_nothing_else(tmp_path):
    assert read(tmp_path) is None
    ledger = Ledger(step=4, lost_steps=1, productive=2.5)
    write(tmp_path, ledger)
    assert read(tmp_path) == ledger
    (tmp_path / FILE).write_text('{"step": ')
    assert read(tmp_path) is None
    write(tmp_path / "gone", ledger)  # a folder that vanished is no reason to stop


class Values(Monitor):
    """Keeps the last value of each metric."""

    def __init__(self, stop=0):
        self.stop, self.values = stop, {}

    def on_step(self, report):
        if self.stop and report.step == self.stop:
            raise KeyboardInterrupt  # as a kill: nothing is saved

    def on_metrics(self, report):
        self.values.update(report.values)


def fit(folder, steps, resume=None, stop=0):
    values = Values(stop)
    changes = {**RUN, "run": {"steps": steps}}
    engine = make_engine(ALONE, changes, folder=folder, resume=resume, callbacks=[values])
    if stop:
        with pytest.raises(KeyboardInterrupt):
            engine.fit()
    else:
        engine.fit()
    return values.values


def test_steps_that_a_restart_makes_anew_are_lost(tmp_path):
    fit(tmp_path, 8, stop=5)
    assert json.loads((tmp_path / FILE).read_text())["step"] == 5
    values = fit(tmp_path, 8, resume="auto")
    assert values["reliability/restarts"] == 1.0
    assert values["reliability/lost_steps"] == 2.0  # saved after the third, ended in the fifth
    assert values["lost/redone"] > 0
    lost = [value for name, value in values.items() if name.startswith("lost/")]
    assert len(lost) == 6
    # Dates in seconds are kept to 2.4e-7 s, and the two attempts took a fraction of a second.
    assert values["goodput"] + sum(lost) == pytest.approx(1.0, abs=1e-3)
    assert values["checkpoint/ok"] == 1.0
    assert values["checkpoint/age"] > 0


def started(folder, told):
    """Return a monitor in a run that begins in ``folder``; what it publishes is in ``told``."""
    monitor = Goodput(GoodputConfig())
    run = SimpleNamespace(
        folder=folder,
        rank=0,
        first_step=0,
        progress=Progress(),
        device=torch.device("cpu"),
        metrics=SimpleNamespace(scalar=told.__setitem__),
    )
    monitor.on_start(run)
    return monitor


def test_a_rollback_is_entered(tmp_path):
    told = {}
    monitor = started(tmp_path, told)
    monitor.on_rollback(SimpleNamespace(step=7, restored=4))
    assert (read(tmp_path).rollbacks, read(tmp_path).lost_steps, read(tmp_path).step) == (1, 3, 4)
    monitor.on_step(SimpleNamespace(step=5))
    assert (told["reliability/rollbacks"], told["reliability/lost_steps"]) == (1, 3)


@pytest.mark.parametrize(
    ("seconds", "takes", "written"),
    [(0.9, 0.0001, [1, 2, 3, 4]), (0.9, 0.0011, [1, 3]), (1.1, 0.0200, [1, 2, 3, 4])],
    ids=["local", "slow", "slow, and steps too"],
)
def test_a_kill_loses_no_step_that_takes_longer_than_a_write_may(
    tmp_path, monkeypatch, seconds, takes, written
):
    """The file has the last step, unless steps follow faster than writes may: of a second none is lost."""
    now, seen = [100.0], []

    def slow(folder, ledger):
        now[0] += takes
        seen.append(ledger.step)

    monkeypatch.setattr(goodput.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(goodput, "write", slow)
    monitor = started(tmp_path, {})
    for step in range(1, 5):
        now[0] += seconds
        monitor.on_step(SimpleNamespace(step=step))
    assert seen == written


def test_the_size_of_a_checkpoint_is_that_of_its_files(tmp_path):
    monitor = Goodput(GoodputConfig())
    (tmp_path / "step-3" / "rank-0").mkdir(parents=True)
    (tmp_path / "step-3" / "meta.json").write_bytes(bytes(2**19))
    (tmp_path / "step-3" / "rank-0" / "weights").write_bytes(bytes(2**20))
    monitor._measure(tmp_path / "step-3")
    assert monitor.saved["checkpoint/size"] == 1.5
    monitor._measure(tmp_path / "step-3" / "meta.json")  # of one file
    assert monitor.saved["checkpoint/size"] == 0.5
