"""A monitor that fails on one rank leaves no rank alone in a collective, and the run goes on."""

import os

import pytest
import torch
import torch.distributed as dist
from structlog.testing import capture_logs

from nanotrain_core.contracts import Monitor
from nanotrain_core.metrics.declared import Metric
from nanotrain_core.run.monitor_collectives import MonitorCollectives
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.pool import RankFailure
from nanotrain_core.testing.probe import Reports, make_engine, weights

DDP = Case("parallel", use="ddp", topology={"dp": 2})
STEPS = {"run": {"steps": 6, "log_every": 3, "strict_monitors": False}}


class Fails(Monitor):
    """Fails on rank 1 in some steps of some events, before a collective that the other rank enters."""

    declared = (Metric(name="seen", unit="1", group="test", summary="events", reduce="sum"),)

    def __init__(self, how, event, steps):
        self.how, self.event, self.steps = how, event, steps
        self.after, self.told = [], {}

    def on_start(self, run):
        self.run = run

    def on_before_update(self, update):
        self._hear("on_before_update", update.step, update)

    def on_step(self, report):
        self._hear("on_step", report.step)

    def on_metrics(self, report):
        self.told[report.step] = (report.values.get("seen"), dict(report.failed))

    def _hear(self, event, step, update=None):
        if event != self.event:
            return
        self.run.metrics.scalar("seen", 1)
        if self.run.rank == 1 and step in self.steps:
            raise ZeroDivisionError(f"planted in step {step}")
        if self.how == "mesh":
            one = torch.ones(1)
            self.run.mesh.all_reduce(one)
            assert one.item() == 2
        elif self.how == "sums":
            sums, most = torch.ones(1), torch.full((1,), float(self.run.rank))
            self.run.mesh.all_reduce_sum_and_max(sums, most)
            assert (sums.item(), most.item()) == (2, 1)
        elif self.how == "gather":
            assert self.run.mesh.gather(self.run.rank) == [0, 1]
        elif self.how == "norms" and update is not None:
            update.norms()
        elif self.how == "group":
            self.run.monitor_barrier()
            dist.all_reduce(torch.ones(1))
        elif self.how == "logits":
            self.run.logits(torch.zeros(1, 16, dtype=torch.int64))
        self.after.append(step)


class Talks(Monitor):
    """Another monitor, whose collectives go on."""

    def on_start(self, run):
        self.run, self.sums = run, []

    def on_before_update(self, update):
        one = torch.ones(1)
        self.run.mesh.all_reduce(one)
        self.sums.append(one.item())


def watched(case, monitors, changes=STEPS):
    engine = make_engine(case, changes)
    seen = Reports()
    engine.events.monitors = [*monitors, seen]
    with capture_logs() as logs:
        engine.fit()
    return monitors, [report.loss for report in seen.reports], weights(engine.run), logs


def failing(case, how, event, steps):
    (monitor, talks), losses, after, logs = watched(case, [Fails(how, event, steps), Talks()])
    return monitor.after, monitor.told, talks.sums, losses, after, logs


@pytest.fixture(scope="module")
def alone():
    return [losses for _, losses, _, _ in run_ranks(watched, 2, DDP, [])]


@pytest.mark.full_cases("gather-on_step", "norms-on_before_update", "group-on_before_update")
@pytest.mark.parametrize(
    ("how", "event"),
    [
        ("mesh", "on_before_update"),
        ("gather", "on_step"),
        ("sums", "on_step"),
        ("norms", "on_before_update"),
        ("group", "on_before_update"),
        ("logits", "on_step"),
        ("nothing", "on_before_update"),
    ],
)
def test_an_exception_on_one_rank_ends_the_event_on_all_and_training_goes_on(how, event, alone):
    heard = [1, 2, 3, 4, 5, 6] if event == "on_before_update" else [3, 6]
    planted = [2, 3] if event == "on_before_update" else [3]
    one, other = run_ranks(failing, 2, DDP, how, event, planted)
    left = [step for step in heard if step not in planted]
    assert other[0] == left
    assert one[0] == (heard if how == "nothing" else left)  # without a collective nobody need know at once
    for after, told, sums, losses, _, logs in (one, other):
        assert losses == alone[0]
        assert sums == [2.0] * 6
        # What was published in an interval with a failure differs between ranks, and is left out.
        seen = 6.0 if event == "on_before_update" else 2.0
        assert told == {3: (None, {"Fails": 1}), 6: (seen, {})}
        assert after
        assert logs
    events = [entry["event"] for entry in one[-1]]
    assert "a monitor failed on a rank: what it published until this step is left out" in events
    assert [e["monitor"] for e in other[-1] if e["log_level"] == "error"] == [f"Fails.{event}"]  # told once


class CannotStart(Monitor):
    """Fails on rank 1 while it starts, after it observes the model; notes on both ranks what it hears."""

    every_step = True
    declared = Fails.declared

    def __init__(self):
        self.heard = []

    def on_start(self, run):
        run.metrics.scalar("seen", 1)
        run.observe_outputs(lambda name, output: self.heard.append(name))
        if run.rank == 1:
            raise ZeroDivisionError("planted in on_start")

    def on_before_update(self, update):
        self.heard.append("on_before_update")

    def on_step(self, report):
        self.heard.append("on_step")

    def on_metrics(self, report):
        self.heard.append("on_metrics")

    def derive(self, report):
        self.heard.append("derive")
        return {}

    def on_end(self, report):
        self.heard.append("on_end")

    def meta(self):
        return {"steps": len(self.heard)}


def cannot_start():
    engine = make_engine(DDP, STEPS)
    monitors = [CannotStart(), Talks()]
    seen = Reports()
    engine.events.monitors = [*monitors, seen]
    engine.events.load_meta({"CannotStart": {"steps": 7}})
    with capture_logs() as logs:
        engine.fit()
    every = [report.step for report in seen.reports]
    return monitors[0].heard, monitors[1].sums, every, engine.events.meta(), logs


def test_a_monitor_that_cannot_start_on_one_rank_hears_of_nothing_more_on_any():
    one, other = run_ranks(cannot_start, 2)
    for heard, sums, steps, meta, _ in (one, other):
        assert heard == []
        assert sums == [2.0] * 6  # the other monitor goes on
        assert steps == [3, 6]  # nobody is left who wants every step
        assert meta == {"CannotStart": {"steps": 7}}  # what a checkpoint knew of it, for the next resume
    left_out = [e for e in one[-1] if e["event"] == "a monitor could not start: it is left out"]
    assert [(e["monitor"], e["on_ranks"]) for e in left_out] == [("CannotStart", [1])]
    assert [e["monitor"] for e in other[-1] if e["log_level"] == "error"] == ["CannotStart.on_start"]


class Skips(Monitor):
    """Leaves out a collective on one rank, without an exception; another monitor calls the next."""

    def on_start(self, run):
        self.run = run

    def on_before_update(self, update):
        if not (self.run.rank and update.step == 2):
            self.run.monitor_barrier()


def skip():
    make_engine(DDP, {"run": {"steps": 3}}, callbacks=[Skips(), Talks()]).fit()


def test_ranks_in_different_monitors_are_told_instead_of_hanging():
    with pytest.raises(RankFailure, match="ranks are in collectives of different monitors or events"):
        run_ranks(skip, 2, timeout=60)


class AsksAlone(Monitor):
    """Calls collectives that have one member, on rank 0 alone."""

    def on_start(self, run):
        self.run, self.found = run, []

    def on_before_update(self, update):
        if self.run.rank == 0:
            one = torch.ones(1)
            self.run.mesh.all_reduce(one, "tp")
            self.found.append((one.item(), self.run.mesh.gather("here", "tp")))


def ask_alone():
    (asks, talks), *_ = watched(DDP, [AsksAlone(), Talks()])
    return asks.found, talks.sums


def test_a_collective_with_one_member_is_no_business_of_other_ranks():
    (found, sums), _ = run_ranks(ask_alone, 2)
    assert found == [(1.0, ["here"])] * 6
    assert sums == [2.0] * 6


def opened_and_closed(times):
    """Return how many files this process has open after each of several agreements."""
    mesh, used = make_engine(DDP, {}).run.mesh, []
    for _ in range(times):
        together = MonitorCollectives(mesh, 1)
        together.at = 0, "first"
        together.enter()
        together.close()
        together.enter()  # nothing to agree on any more
        used.append(len(os.listdir("/dev/fd")))
    return used


def test_agreements_that_are_over_hold_no_connections():
    for used in run_ranks(opened_and_closed, 2, 4):
        assert used[-1] == used[0]


def strict():
    engine = make_engine(DDP, STEPS | {"run": {"steps": 6, "strict_monitors": True}})
    engine.events.monitors = [Fails("mesh", "on_before_update", [2])]
    with pytest.raises(Exception, match=r"planted in step 2|failed on rank 1") as caught:
        engine.fit()
    return type(caught.value).__name__, str(caught.value)


def test_in_a_strict_run_all_ranks_stop_and_know_who_failed():
    one, other = run_ranks(strict, 2)
    assert one == ("NanotrainError", "the monitor in Fails.on_before_update: it failed on rank 1")
    assert other == ("ZeroDivisionError", "planted in step 2")


def test_without_other_ranks_nothing_is_agreed_on():
    (monitor,), losses, *_ = watched(DDP.alone(), [Talks()])
    assert monitor.sums == [1.0] * 6
    assert len(losses) == 2


def other_monitors(rank_of_more):
    engine = make_engine(DDP, {})
    engine.events.monitors = [Talks()] * (2 if engine.run.mesh.rank == rank_of_more else 1)
    engine.fit()


def test_ranks_with_other_monitors_are_refused():
    with pytest.raises(
        RankFailure, match="rank 1 has the monitors Talks, Talks-2, rank 0 Talks: give all ranks"
    ):
        run_ranks(other_monitors, 2, 1)
