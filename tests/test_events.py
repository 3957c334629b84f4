"""A monitor that fails does not take the run with it, unless it means to."""

import json

import pytest
import structlog
import torch
from declared_metric import metric

from nanotrain_core.contracts import EndReport, EvaluationReport, Monitor
from nanotrain_core.errors import Diverged
from nanotrain_core.run.events import Events
from nanotrain_core.run.log import FILE, kept_in
from nanotrain_core.run.stop import Rollback, StopRequest
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import make_engine

END = EndReport(1, "done", 0)


class Fails(Monitor):
    def __init__(self, error):
        self.error = error

    def on_end(self, report):
        raise self.error


class Remembers(Monitor):
    seen = None

    def on_end(self, report):
        self.seen = report


def test_a_failing_monitor_is_logged_and_the_next_one_still_hears():
    other = Remembers()
    with structlog.testing.capture_logs() as logs:
        Events([Fails(ZeroDivisionError("x")), other], StopRequest()).end(END)
    (entry,) = logs
    assert (entry["monitor"], entry["log_level"]) == ("Fails.on_end", "error")
    assert other.seen is END


class Uploads(Fails):
    def on_before_restore(self, restore):
        pass


def test_who_hears_of_the_end_hears_of_an_upload_that_fails_it():
    """Alerts had told a good end of a run with exit code 7, or had not been called at all."""
    for order in (1, -1):
        monitors = [Remembers(), Uploads(Diverged("not stored")), Remembers()][::order]
        with pytest.raises(Diverged, match="not stored"):
            Events(monitors, StopRequest()).end(END)
        assert [each.seen.reason for each in monitors if isinstance(each, Remembers)] == ["failed"] * 2


class GivesUp(Monitor):
    def on_before_save(self, step):
        raise Diverged(f"given up at {step}")


class LastSave(Monitor):
    last = 0

    def on_before_save(self, step):
        self.last = step


def test_monitors_after_one_that_ends_the_run_receive_the_event_too():
    """The row of the step at which ``guard`` gives up had been missing if it came before ``jsonl``."""
    after = LastSave()
    with pytest.raises(Diverged, match="given up at 3"):
        Events([GivesUp(), GivesUp(), after], StopRequest()).before_save(3)
    assert after.last == 3


class FailsInEachStep(Monitor):
    def on_before_save(self, step):
        raise ValueError(f"no shape for step {step}" if step < 5 else "another reason")


def test_a_failure_is_told_in_full_once_and_counted_at_the_end(tmp_path):
    events = Events([FailsInEachStep()], StopRequest())
    with structlog.testing.capture_logs() as logs, kept_in(tmp_path, 0) as file:
        file.begin()
        for step in range(1, 6):
            events.before_save(step)
        events.end(END)
    told = [(entry["log_level"], entry["monitor"], entry.get("times")) for entry in logs]
    name = "FailsInEachStep.on_before_save"
    assert told == [("error", name, None), ("error", name, None), ("warning", name, 3)]
    assert [entry.get("exc_info") for entry in logs] == [True, True, None]
    rows = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert [row["error"].partition(" (")[0] for row in rows] == [
        f"ValueError: no shape for step {step}" for step in (2, 3, 4)
    ]


def test_strict_monitors_and_deliberate_errors_stop_the_run():
    with pytest.raises(ZeroDivisionError):
        Events([Fails(ZeroDivisionError("x"))], StopRequest(), strict=True).end(END)
    with pytest.raises(Diverged, match="loss is gone"):
        Events([Fails(Diverged("loss is gone"))], StopRequest()).end(END)


class Wishes(Monitor):
    def on_end(self, report):
        return "halt"


def test_a_wish_that_is_none_is_told_and_no_stop():
    stop, text = StopRequest(), """on_end returned 'halt'; expected None, "stop", an earlier Rollback"""
    with structlog.testing.capture_logs() as logs:
        Events([Wishes()], stop).end(END)
    assert [entry["monitor"] for entry in logs] == ["Wishes.on_end"]
    assert not any(stop.flags())
    with pytest.raises(TypeError, match=text):
        Events([Wishes()], stop, strict=True).end(END)


class GoesBack(Monitor):
    def __init__(self, onset):
        self.onset = onset

    def on_evaluation(self, report):
        return Rollback(self.onset, "x")


@pytest.mark.parametrize("onset", [8, 0, -3, 6.5, "6", None], ids=repr)
def test_a_rollback_to_no_step_that_was_taken_is_a_failure_of_the_monitor(onset):
    """An onset in the future left out all data since the run began."""
    stop = StopRequest()
    with structlog.testing.capture_logs() as logs:
        Events([GoesBack(onset)], stop).evaluation(EvaluationReport(7, 1.0, None, 1))
    assert [entry["monitor"] for entry in logs] == ["GoesBack.on_evaluation"]
    assert stop.rollback is None
    Events([GoesBack(7)], stop).evaluation(EvaluationReport(7, 1.0, None, 1))
    assert stop.rollback == Rollback(7, "x")


class Counts(Monitor):
    def __init__(self, number):
        self.number = number

    def meta(self):
        return {"number": self.number} if self.number else {}

    def load_meta(self, meta):
        self.number = meta["number"]


def test_two_monitors_of_one_kind_remember_each_its_own():
    saved = Events([Counts(1), Remembers(), Counts(0), Counts(3)], StopRequest()).meta()
    after = [Counts(7), Counts(8), Remembers(), Counts(9)]
    Events(after, StopRequest()).load_meta(saved)
    assert [after[0].number, after[1].number, after[3].number] == [1, 8, 3]


class Odd(Monitor):
    def __init__(self, meta):
        self.own = meta

    def meta(self):
        return self.own["meta"]

    def load_meta(self, meta):
        raise LookupError(meta)


@pytest.mark.parametrize(
    "own", [{}, {"meta": {"seen": torch.ones(1)}}, {"meta": {1: 2}}, {"meta": None}], ids=repr
)
def test_a_monitor_that_cannot_be_remembered_is_logged_and_left_out(own):
    with structlog.testing.capture_logs() as logs:
        saved = Events([Odd(own), Counts(3)], StopRequest()).meta()
    assert saved == {"Counts": {"number": 3}}
    assert [entry["monitor"] for entry in logs] == ["Odd.meta"]
    with pytest.raises((LookupError, TypeError)):
        Events([Odd(own)], StopRequest(), strict=True).meta()


def test_a_monitor_that_cannot_take_back_what_it_said_is_logged_and_the_next_one_can():
    after = Counts(0)
    with structlog.testing.capture_logs() as logs:
        Events([Odd({}), after], StopRequest()).load_meta({"Odd": {"a": 1}, "Counts": {"number": 3}})
    assert [entry["monitor"] for entry in logs] == ["Odd.load_meta"]
    assert after.number == 3


def test_ranks_agree_on_the_most_urgent_wish():
    here, there = StopRequest(), StopRequest()
    here.request("stopped")
    there.request("preempted")
    summed = [a + b for a, b in zip(here.flags(), there.flags(), strict=True)]
    for request in (here, there):
        assert request.reason is None
        request.agree(summed)
        assert request.reason == "preempted"


class Looks(Monitor):
    """Copies weights and gradients before each update, and weights when the step is done."""

    def __init__(self, run):
        self.run, self.events = run, []

    def weights(self):
        return [placed.parameter.detach().clone() for placed in self.run.placed]

    def on_before_update(self, update):
        gradients = [found.tensor.clone() for found in update.gradients()]
        self.events.append(("before_update", update.step, self.weights(), gradients))

    def on_step(self, report):
        self.events.append(("step", report.step, self.weights()))

    def on_before_save(self, step):
        self.events.append(("before_save", step))

    def on_checkpoint(self, report):
        self.events.append(("checkpoint", report.step))


def look_on(case, changes, folder):
    engine = make_engine(case, changes, folder=folder)
    looks = Looks(engine.run)
    engine.events.monitors = [looks]
    engine.fit()
    return looks.events


def test_before_an_update_the_sum_over_ranks_is_complete_and_weights_are_the_old_ones(tmp_path):
    """Steps of gradient descent can then be done by hand; a report of the step comes afterwards, if any."""
    case = Case("parallel", use="ddp", topology={"dp": 2})
    changes = {"run": {"steps": 4, "log_every": 2}, "checkpoint": {"use": "simple", "every": 2}}
    for events in run_ranks(look_on, 2, case, changes, tmp_path):
        assert [event[:2] for event in events] == [
            *(("before_update", 1), ("before_update", 2), ("step", 2), ("before_save", 2), ("checkpoint", 2)),
            *(("before_update", 3), ("before_update", 4), ("step", 4), ("before_save", 4), ("checkpoint", 4)),
        ]
        afterwards = [events[1][2], events[2][2], events[6][2], events[7][2]]
        for (_, step, weights, gradients), after in zip(
            (event for event in events if event[0] == "before_update"), afterwards, strict=True
        ):
            for old, gradient, new in zip(weights, gradients, after, strict=True):
                torch.testing.assert_close(old - 0.1 * gradient, new, rtol=0, atol=1e-12, msg=f"step {step}")


class MeasuresEvaluations(Monitor):
    declared = (metric("validation/measured"),)

    def __init__(self):
        self.told = []

    def on_start(self, run):
        self.metrics = run.metrics

    def on_evaluation(self, report):
        self.metrics.scalar("validation/measured", report.loss)

    def on_metrics(self, report):
        self.told += [report.step] if "validation/measured" in report.values else []

    def on_before_save(self, step):
        self.told.append(f"save {step}")


def test_what_is_published_of_an_evaluation_is_told_before_the_checkpoint(tmp_path):
    """It went out with the next logged step, and a run restarted from that checkpoint lost it."""
    changes = {
        "run": {"steps": 3, "log_every": 1},
        "evaluation": {"sequences": 8, "every": 2},
        "checkpoint": {"use": "simple", "every": 2},
    }
    engine = make_engine(Case("parallel", use="ddp", topology={"dp": 2}).alone(), changes, folder=tmp_path)
    engine.events.monitors = [measures := MeasuresEvaluations()]
    engine.fit()
    assert measures.told == [0, 2, "save 2", 3, "save 3"]
