"""A rank's own work is told from its time in exchanges, by the host's clock and by a device's."""

import time
from types import SimpleNamespace

import pytest
import torch

from nanotrain_core.layout.layout import Span
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import make_engine
from nanotrain_core.watch.device_clock import MOST_WAITING, DeviceClock
from nanotrain_core.watch.progress import Progress, TimeSpent
from nanotrain_core.watch.waits import Waits


@pytest.fixture
def clock(monkeypatch):
    """A host's clock that is set by hand."""
    found = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: found.now)
    return found


def test_a_phase_is_split_into_work_and_exchanges(clock):
    waits = Waits()
    progress = Progress(waits)
    progress.note("data")
    clock.now = 1.0
    progress.note("optimizer")
    with waits.collectives:
        clock.now = 3.0
        with waits.messages:  # part of the collective that it is in
            clock.now = 4.0
    with progress.within("monitors"), waits.messages:
        clock.now = 9.0
    clock.now = 9.5
    progress.note("data")
    assert progress.spent["data"] == TimeSpent(1.0)
    assert progress.spent["optimizer"] == TimeSpent(3.5, collectives=3.0)
    assert progress.spent["monitors"] == TimeSpent(5.0, messages=5.0)
    assert progress.work("data", "optimizer", "none") == 1.5
    assert progress.phase == "data"


def test_what_an_exchange_returns_is_counted_when_it_is_waited_for(clock):
    def begin(seconds):
        clock.now += 1
        return lambda: setattr(clock, "now", clock.now + seconds) or "sum"

    waits = Waits()
    pending = waits.timed(begin)(5.0)
    assert waits.collectives.seconds == 1.0
    clock.now += 100
    assert pending() == "sum"
    assert waits.collectives.seconds == 6.0


class Event:
    """A point of a stream whose time is in milliseconds; the device has come as far as ``reached``."""

    time, reached = 0.0, 0.0

    def record(self):
        self.at = Event.time

    def query(self):
        return self.at <= Event.reached

    def elapsed_time(self, later):
        return later.at - self.at


def test_a_device_is_timed_by_events_that_are_read_late():
    Event.time = Event.reached = 0.0
    waits = Waits()
    progress = Progress(waits)
    progress.note("forward and backward")
    progress.use_clock(DeviceClock(Event))
    Event.time = 1000.0
    with waits.collectives:  # the stream waits until 4000
        Event.time = 4000.0
    Event.time = 6000.0
    progress.note("optimizer")
    assert progress.measured() == {}
    Event.reached = 4000.0
    assert progress.measured() == {"forward and backward": TimeSpent(0.0, collectives=3.0)}
    Event.reached = 6000.0
    assert progress.measured() == {"forward and backward": TimeSpent(6.0, collectives=3.0)}
    assert progress.work("forward and backward") == 3.0


def test_a_clock_that_nobody_reads_does_not_grow():
    Event.time = Event.reached = 0.0
    clock = DeviceClock(Event)
    for _ in range(3 * MOST_WAITING):
        clock.add("collectives", clock.now(), clock.now())
    assert len(clock._waiting) <= MOST_WAITING


def seconds_in_exchanges(case, late):
    """Return what each rank spends in exchanges of every kind, where one comes late to each."""
    mesh = make_engine(case, {}).run.mesh
    exchange = mesh.exchange_of(Span(("dp",)))
    x = torch.ones(4)
    buckets, buffer = exchange.buckets(1024, least=64), exchange.buffer(4, torch.float32)
    calls = {
        "gather": lambda: mesh.gather(1),
        "mesh": lambda: mesh.all_reduce(x.clone()),
        "all_reduce": lambda: exchange.all_reduce(x),
        "all_gather": lambda: exchange.all_gather(x, async_op=True),
        "reduce_scatter": lambda: exchange.reduce_scatter(x.view(2, 2)),
        "all_to_all": lambda: exchange.all_to_all(torch.empty(4), x),
        "shift": lambda: exchange.shift(torch.empty(4), x),
        "buffer": buffer.all_reduce,
        "buckets": lambda: (buckets.reduce_scatter(8, lambda flat: None, x, add=False), buckets.drain()),
    }
    found = {}
    for name, call in calls.items():
        mesh.barrier()
        time.sleep(0.2 * (mesh.rank == late))
        before = mesh.waits.collectives.seconds
        pending = call()
        if callable(pending):
            pending()
        found[name] = mesh.waits.collectives.seconds - before
    return found


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_every_exchange_counts_and_who_is_late_waits_least(kernels):
    case = Case("parallel", use="ddp", topology={"dp": 2}, overrides={"kernels": {"use": kernels}})
    waits, late = run_ranks(seconds_in_exchanges, 2, case, 1)
    assert {name for name in waits if waits[name] < 0.1} == set()
    assert {name for name in late if late[name] > waits[name] - 0.08} == set()
