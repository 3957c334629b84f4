"""The queue of sinks: no step waits for one or fails with it, and nothing is lost without a word."""

import threading
import time

import pytest
from structlog.testing import capture_logs

from nanotrain_core.contracts import EndReport, MetricsReport, RollbackReport
from nanotrain_core.monitors.sink import Sink
from nanotrain_core.monitors.sink_queue import SinkQueue
from nanotrain_core.testing import Case
from nanotrain_core.testing.probe import make_engine


def said(logs):
    return [{key: value for key, value in entry.items() if key != "exc_info"} for entry in logs]


def test_calls_are_made_in_order_by_another_thread():
    queue, called = SinkQueue("test"), []
    for number in range(100):
        assert queue.put(lambda n: called.append((n, threading.current_thread().name)), number)
    assert queue.close(5)
    assert called == [(number, "nanotrain-test") for number in range(100)]


def test_what_does_not_fit_is_dropped_and_counted_without_waiting():
    queue, gate, called = SinkQueue("slow", size=3), threading.Event(), []
    with capture_logs() as logs:
        queue.put(gate.wait)
        while queue._waiting:
            time.sleep(0.001)  # until the thread has the first
        began = time.monotonic()
        taken = [queue.put(called.append, number) for number in range(10)]
        assert queue.put(called.append, "must", must=True)
        assert time.monotonic() - began < 0.5
        gate.set()
        assert not queue.close(5)
    assert taken == [True] * 3 + [False] * 7
    assert called == [0, 1, 2, "must"]
    assert [entry.get("dropped") for entry in said(logs)] == [None, 7]  # said at the first, and at the end


def test_failures_are_told_once_and_end_neither_thread_nor_caller():
    queue, called = SinkQueue("broken"), []

    def fail():
        raise ConnectionError("no route to host")

    with capture_logs() as logs:
        for call in (fail, fail, lambda: called.append(1)):
            queue.put(call)
        assert not queue.close(5)
    first, last = said(logs)
    assert (first["log_level"], first["sink"], first["problem"]) == ("error", "broken", "no route to host")
    assert (last["failed"], last["dropped"], called) == (2, 0, [1])


def test_the_end_waits_no_longer_than_it_was_told():
    queue, gate = SinkQueue("stuck"), threading.Event()
    queue.put(gate.wait)
    queue.put(print, "never")
    began = time.monotonic()
    with capture_logs() as logs:
        assert not queue.close(0.1)
    assert time.monotonic() - began < 2
    assert said(logs)[0]["not_written_in_time"] == 2
    assert not queue.put(print, "never")
    gate.set()


class Slow(Sink):
    """Writes one report, and then waits for a server that does not answer."""

    waiting, patience = 2, 0.1

    def __init__(self, *, opens=True):
        self.got, self.gate, self.opens = [], threading.Event(), opens

    def open(self, run):
        if not self.opens:
            raise OSError("quota exceeded")
        self.got.append(("open", run.first_step))

    def write(self, report):
        self.got.append(("write", report.step))
        self.gate.wait()

    def rolled_back(self, report):
        self.got.append(("rolled_back", report.restored))

    def finish(self, report):
        self.got.append(("finish", report.reason))


@pytest.mark.parametrize("opens", [True, False])
def test_a_run_trains_the_same_whatever_becomes_of_its_sink(opens):
    class Keeps(Slow):
        patience = 0.0

    losses = []
    for callbacks in ([], [Keeps(opens=opens)]):
        case = Case("monitor", use="jsonl")
        engine = make_engine(case, {"run": {"steps": 6}}, callbacks=[Losses(losses), *callbacks])
        with capture_logs() as logs:
            engine.fit()
    assert losses[:6] == losses[6:]
    text = "a sink is too slow" if opens else "a sink could not begin"
    assert any(entry["event"].startswith(text) for entry in logs)
    callbacks[0].gate.set()


class Losses(Slow):
    """Keeps the bits of losses, in the step itself."""

    def __init__(self, losses):
        self.losses = losses

    def on_start(self, run): ...

    def on_step(self, report):
        self.losses.append((report.loss.hex(), report.grad_norm.hex()))


def test_a_sink_hears_of_seams_in_order_on_rank_0_alone():
    class Info:
        rank, first_step = 0, 3

    sink = Slow()
    sink.gate.set()
    sink.patience, sink.waiting = 5, 10
    sink.on_start(Info())
    sink.on_metrics(MetricsReport(4, {"loss": 1.0}))
    sink.on_rollback(RollbackReport(4, 4, 3, (0, 1), 1, "spike"))
    sink.on_metrics(MetricsReport(4, {"loss": 1.0}))
    sink.on_end(EndReport(4, "done", 8))
    assert sink.got == [
        ("open", 3),
        ("write", 4),
        ("rolled_back", 3),
        ("write", 4),
        ("finish", "done"),
    ]
    other = Slow()
    Info.rank = 1
    other.on_start(Info())
    other.on_metrics(MetricsReport(4, {"loss": 1.0}))
    other.on_end(EndReport(4, "done", 8))
    assert other.got == []
