"""A monitor that fails does not take the run with it, unless it means to."""

import pytest
import structlog

from nanotrain_core.contracts import EndReport, Monitor
from nanotrain_core.errors import Diverged
from nanotrain_core.events import Events
from nanotrain_core.stop import StopRequest

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


def test_strict_monitors_and_deliberate_errors_stop_the_run():
    with pytest.raises(ZeroDivisionError):
        Events([Fails(ZeroDivisionError("x"))], StopRequest(), strict=True).end(END)
    with pytest.raises(Diverged, match="loss is gone"):
        Events([Fails(Diverged("loss is gone"))], StopRequest()).end(END)


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


def test_ranks_agree_on_the_most_urgent_wish():
    here, there = StopRequest(), StopRequest()
    here.wish("stopped")
    there.wish("preempted")
    summed = [a + b for a, b in zip(here.flags(), there.flags(), strict=True)]
    for request in (here, there):
        assert request.reason is None
        request.agree(summed)
        assert request.reason == "preempted"
