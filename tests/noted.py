"""Runs with the performance monitors in which each rank notes apart what they measure.

Kept are the clock readings of the run, and what began at each. Memory of GPUs and NVML are fakes, other on
each rank.
"""

import statistics
import sys
import time
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import attrs
import numpy
import pytest
import torch
from nanotrain_performance import goodput as goodput_module
from nanotrain_performance import throughput as throughput_module
from nanotrain_performance.ledger import Ledger, write

from nanotrain_core.contracts import Monitor
from nanotrain_core.testing.probe import make_engine
from nanotrain_core.watch import progress as progress_module

PEAK, MIB, SEQUENCES, LENGTH = 0.5, 2**20, 8, 16
#: After so many steps the run stops as a monitor asked for in the step before: there is time left.
STEPS, PLANNED, SAVE_EVERY, EVALUATE_EVERY = 12, 40, 7, 5
USED = [
    {"use": "throughput", "peak_tflops": PEAK},
    {"use": "memory"},
    {"use": "pipeline"},
    {"use": "goodput"},
    {"use": "device", "every_seconds": 1000.0},
    {"use": "stragglers", "every": 1},
]
#: Parts of a run that are no step's, and those that are monitors'.
BESIDE = {"start", "evaluation", "checkpoint", "end"}
MONITORS = {"monitors", "monitors before the update"}
PASSES = "forward and backward"
#: Of the attempt before this one, which saved nothing: its steps, and seconds.
BEFORE, TRAINED, GONE = 3, 40.0, 50.0


class Clock:
    """Reads the clock and remembers what it read."""

    def __init__(self):
        self.last, self.monotonic, self.time = 0.0, time.monotonic, time.time

    def perf_counter(self):
        self.last = time.perf_counter()
        return self.last


@attrs.define
class Seen:
    """What one rank saw."""

    rank: int
    stage: int
    share: float
    """Of the FLOPs, of its pipeline stage."""
    ranks: int
    flops_per_token: float
    values: dict = attrs.field(factory=dict)
    """The last that was told of each metric."""
    reports: list = attrs.field(factory=list)
    told: list = attrs.field(factory=list)
    """Of each logged step, its values."""
    bytes: dict = attrs.field(factory=dict)
    held: list = attrs.field(factory=list)
    """Histograms of every rank's memory."""
    events: list = attrs.field(factory=list)
    """Each part of the run that began: its name, when, and seconds in collectives and messages so far."""
    marks: list = attrs.field(factory=list)
    """How many of them there were at each logged step, and at the start."""
    steps: list = attrs.field(factory=list)
    """When each update was near, and how many events there were."""
    paces: list = attrs.field(factory=list)
    """When each logged step was told."""
    idle: list = attrs.field(factory=list)
    saves: list = attrs.field(factory=list)
    """Reports of checkpoints, each with the time."""
    size: int = 0
    """Of the newest checkpoint, in bytes."""
    resident: float = 0.0
    ended: float = 0.0
    """The date of the last report."""
    down: float = 0.0
    """Seconds between the attempt before and this one."""

    def spent(self, parts, first, last):
        """Return seconds, of which in collectives and in messages, of parts that ended in between."""
        total = numpy.zeros(3)
        for (part, *began), (_, *ended) in zip(
            self.events[first:last], self.events[first + 1 : last], strict=False
        ):
            if parts(part):
                total += numpy.subtract(ended, began)
        return total

    def in_step(self, parts, number=-1):
        """Return them in one logged step."""
        return self.spent(parts, self.marks[number - 1] - 1, self.marks[number])

    def busy(self, *names, number=-1):
        seconds, collectives, messages = self.in_step(names.__contains__, number)
        return seconds - collectives - messages

    @property
    def work(self):
        return self.in_step(lambda part: part not in BESIDE | MONITORS)

    @property
    def step(self):
        return self.work[0] + self.in_step(MONITORS.__contains__)[0]

    @property
    def windows(self):
        """Return seconds from each update to the next, but of evaluations and saves."""
        points = [when - self.spent(BESIDE.__contains__, 0, events)[0] for when, events in self.steps]
        return numpy.diff(points)

    def own_work(self, last):
        """Return the median of a step's own work, up to one step, over the share of the stage."""
        names = {PASSES, "gradient sync", "optimizer"}
        total = [self.spent(names.__contains__, 0, events) for _, events in self.steps[:last]]
        each = numpy.diff([seconds - collectives - messages for seconds, collectives, messages in total])
        return statistics.median(each[-15:]) / self.share


class Keeps(Monitor):
    """Counts by itself what the others tell."""

    reads_weights = False

    def __init__(self, engine, gone):
        self.engine, self.gone = engine, gone

    def on_start(self, run):
        stage = run.mesh.coordinate("pp")
        self.run = run
        self.seen = Seen(run.rank, stage, max(run.pipeline_share, 0.1), run.world_size, run.flops_per_token)
        self.seen.down = time.time() - run.progress.spent["start"].seconds - self.gone

    def on_before_update(self, update):
        gradients = {each.name: each.tensor.numel() * each.tensor.itemsize for each in update.gradients()}
        weights = [placed.parameter for placed in self.run.placed]
        buffers = [each for part in self.run.parts for each in part.buffers()]
        self.seen.bytes = {
            "gradients": sum(gradients.values()),
            "weights": sum(each.numel() * each.itemsize for each in (*weights, *buffers)),
            "optimizer": sum(2 * weight.numel() * weight.itemsize for weight in weights),
        }

    def on_step(self, report):
        self.seen.reports.append(report)
        self.seen.idle.append(self.engine.executor.idle)
        lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
        self.seen.resident = int(lines["VmRSS"].split()[0]) / 1024
        self.seen.ended = time.time()
        return "stop" if report.step == STEPS - 1 else None

    def on_checkpoint(self, report):
        if report.step < STEPS:  # not the last one, of which nothing more is told
            files = [report.path] if report.path.is_file() else report.path.rglob("*")
            self.seen.size = sum(each.stat().st_size for each in files if each.is_file())
            self.seen.saves.append((time.time(), report))

    def on_metrics(self, report):
        if report.step < STEPS or "loss" in report.values:
            self.seen.values.update(report.values)
        self.seen.told += [report.values] if "loss" in report.values else []
        if "memory/ranks" in report.histograms:
            self.seen.held.append((report.step, report.histograms["memory/ranks"].counts, report.values))


def counters(rank):
    """Return what a GPU's allocator would count, in MiB."""
    return {
        "allocated_bytes.all.current": (10 + rank) * MIB,
        "allocated_bytes.all.peak": (60 - 3 * rank) * MIB,
        "reserved_bytes.all.current": (70 + (5 * rank) % 8) * MIB,
        "reserved_bytes.all.peak": (80 + (3 * rank) % 8) * MIB,
        "num_alloc_retries": 0,
    }


def readings(rank):
    """Return what NVML would say of a GPU, as metrics have it."""
    return {
        "utilization": (50 + rank) / 100,
        "memory": 1024.0 * (3 + rank % 3),
        "power": 200.0 + 7 * rank,
        "temperature": 60.0 - rank,
    }


def nvml(rank):
    """Return a module as pynvml."""
    module, said = ModuleType("pynvml"), readings(rank)
    vars(module).update(
        NVMLError=RuntimeError,
        NVML_TEMPERATURE_GPU=0,
        NVML_CLOCK_SM=1,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=round(100 * said["utilization"])),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=said["memory"] * MIB),
        nvmlDeviceGetPowerUsage=lambda handle: 1000 * said["power"],
        nvmlDeviceGetTemperature=lambda handle, sensor: said["temperature"],
        nvmlDeviceGetClockInfo=lambda handle, kind: 1500,
    )
    return module


def seen(case, folder, gone):
    """Train; return what this rank saw. ``gone``: until when the attempt before was there."""
    changes = {"run": {"steps": PLANNED}, "monitor": USED, "checkpoint": {"every": SAVE_EVERY}}
    engine = make_engine(case, changes, folder=folder)
    keeps = Keeps(engine, gone)
    engine.events.monitors = [*engine.events.monitors, keeps]
    with pytest.MonkeyPatch.context() as patched:
        note(engine, keeps, patched)
        engine.fit()
    return keeps.seen


def note(engine, keeps, patched):
    """Have the readings of clocks and parts kept, and memory and device monitors see a GPU."""
    rank, clocks = engine.run.mesh.rank, Clock()
    events, go_to, waits = [], engine.progress.go_to, engine.progress.waits

    def went(part):
        outer = go_to(part)
        events.append((part, clocks.last, waits.collectives.seconds, waits.messages.seconds))
        return outer

    patched.setattr(progress_module, "time", clocks)
    engine.progress.go_to = went
    ours = Clock()
    patched.setattr(throughput_module, "time", ours)
    patched.setattr(goodput_module, "EVERY", 0.0)
    patched.setattr(torch.cuda, "memory_stats", lambda device: counters(rank))
    patched.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    patched.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(total_memory=100 * MIB, uuid=str(rank)),
    )
    patched.setitem(sys.modules, "pynvml", nvml(rank))
    by_name = {type(each).__name__: each for each in engine.events.monitors}
    for name in ("Memory", "Device"):
        start = by_name[name].on_start
        by_name[name].on_start = partial(on_gpu, start)
    throughput = by_name["Throughput"]
    start, before, step = throughput.on_start, throughput.on_before_update, throughput.on_step

    def on_start(run):
        start(run)
        keeps.begun = len(events)

    def on_before_update(update):
        before(update)
        keeps.seen.steps.append((ours.last, len(events)))

    def on_step(report):
        keeps.seen.events = events
        keeps.seen.marks = keeps.seen.marks or [keeps.begun]
        keeps.seen.marks.append(len(events))
        step(report)
        keeps.seen.paces.append(ours.last)

    throughput.on_start, throughput.on_before_update, throughput.on_step = on_start, on_before_update, on_step


def on_gpu(start, run):
    start(attrs.evolve(run, device=torch.device("cuda", 0)))


def earlier_attempt(folder):
    """Leave the ledger of an attempt that trained and was gone before it saved; return until when it was."""
    gone = time.time() - GONE
    write(folder, Ledger(began=gone - TRAINED, seen=gone, step=BEFORE, productive=TRAINED))
    return gone
