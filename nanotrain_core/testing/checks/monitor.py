"""A monitor only observes: with or without it, a run has the same results."""

from __future__ import annotations

import json
import math
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanotrain_core.contracts import MetricsReport, Monitor
from nanotrain_core.engine import RuntimeEngine
from nanotrain_core.metrics import gathered
from nanotrain_core.metrics.declared import Names
from nanotrain_core.metrics.report import Histogram
from nanotrain_core.run.events import Events
from nanotrain_core.run.stop import StopRequest
from nanotrain_core.testing.case import Case
from nanotrain_core.testing.checks import check, distributed
from nanotrain_core.testing.compare import assert_bitwise
from nanotrain_core.testing.pool import run_ranks
from nanotrain_core.testing.probe import Trace, make_engine, make_run, train
from nanotrain_core.testing.saving import named

#: By how much a number may differ from that of one process, as a share of it: sums are in another order.
ROUNDING = 1e-3
#: Precisions of which this holds on every layout. In others tiles begin elsewhere where a matrix is split:
#: what is rounded, and how often one overflows, is not that of one process.
FINE = ("fp64", "fp32")

#: A run in which every event happens, and long enough for what begins late.
EVENTS = {"run": {"steps": 20}, "evaluation": {"every": 5, "sequences": 8}}


def traces(case: Case, changes: dict[str, Any], **options: Any) -> list[Trace]:
    """Train in a separate run folder."""
    with tempfile.TemporaryDirectory() as name:
        found: list[Trace] = run_ranks(
            train, case.world_size, case, changes, folder=Path(name), save_at=2, **options
        )
        return found


def unwatched(case: Case) -> list[Trace]:
    """Train without monitors: once for the checks that compare with it."""
    key = repr((case.tables(**EVENTS, monitor=[]), case.plugins, case.world_size))
    if key not in _unwatched:
        _unwatched.clear()
        _unwatched[key] = traces(case, {**EVENTS, "monitor": []})
    return _unwatched[key]


_unwatched: dict[str, list[Trace]] = {}


def assert_same_run(watched: list[Trace], alone: list[Trace]) -> None:
    """Compare losses, gradient norms and each rank's own weights, bit for bit.

    The norm of a step that is skipped is infinite or NaN, the same with the monitor as without it.
    """
    for rank, (one, other) in enumerate(zip(watched, alone, strict=True)):
        for field in ("loss", "grad_norm"):
            got, want = ([getattr(report, field) for report in trace.reports] for trace in (one, other))
            same = [*map(repr, got)] == [*map(repr, want)]
            assert same, f"{field} of each step on rank {rank}: {got}, without the monitor {want}"
        assert_bitwise(named(one.weights), named(other.weights), f"weights of rank {rank}")


@check("monitor", since="0.1")
def changes_nothing(case: Case) -> None:
    """With and without the monitor, losses, weights and random-number streams are bitwise the same."""
    watched, alone = traces(case, EVENTS), unwatched(case)
    assert_same_run(watched, alone)
    for rank, (one, other) in enumerate(zip(watched, alone, strict=True)):
        assert_bitwise(one.streams, other.streams, f"random-number streams of rank {rank}")


@check("monitor", since="0.1")
def its_failure_does_not_stop_training(case: Case) -> None:
    """A run in which the monitor fails at every event has the results of a run without it."""
    failing = traces(case, EVENTS, failing_monitors=True)
    assert_same_run(failing, unwatched(case))


@check("monitor", since="0.1")
def works_without_a_folder(case: Case) -> None:
    """In a run that saves nothing, and logs only every second step, the monitor does without."""

    ranks = run_ranks(train, case.world_size, case, {"run": {"log_every": 2, "steps": 3}})
    assert [r.step for r in ranks[0].reports] == [2, 3], (
        f"reports of steps {[r.step for r in ranks[0].reports]}"
    )


@check("monitor", since="0.2")
def state_is_restored(case: Case) -> None:
    """``meta`` is JSON, the same on every rank; a new monitor that loads it returns the same, and keeps it.

    A resumed run calls ``load_meta`` before ``on_start``, which must not reset what was loaded.
    """
    with tempfile.TemporaryDirectory() as name:
        ranks = run_ranks(remembered, case.world_size, case, Path(name))
    first = json.dumps(ranks[0].said, sort_keys=True)
    for rank, found in enumerate(ranks):
        said, again = (json.dumps(each, sort_keys=True) for each in (found.said, found.loaded))
        assert said == first, f"rank {rank} would remember {said}, rank 0 {first}"
        assert again == said, f"rank {rank}: given {said}, a new monitor says {again}"
        for who, meta in found.said.items():
            lost = found.resumed.get(who) == found.started.get(who) != meta
            assert not lost, (
                f"rank {rank}: '{who}' was given {meta} before on_start, and says {found.resumed.get(who)} "
                "after it, as in a new run: let only __init__ set what load_meta loads"
            )


@attrs.define(frozen=True)
class Remembered:
    """What a case's monitors return for ``meta``, by their names."""

    said: dict[str, Any]
    """At the end of a run."""
    loaded: dict[str, Any]
    """New ones that loaded it."""
    resumed: dict[str, Any]
    """Those of a run that was resumed at its last step."""
    started: dict[str, Any]
    """Those of a new run before its first step."""


def remembered(case: Case, folder: Path) -> Remembered:
    """Return the monitors' ``meta`` of a run, of new monitors, of a resumed run, and of a new run."""
    for name in ("run", "new"):
        (folder / name).mkdir(exist_ok=True)
    engine = make_engine(case, EVENTS, folder=folder / "run")
    engine.fit()
    said = _meta(engine.run.monitors)
    new = make_run(case, EVENTS).monitors
    Events(new, StopRequest(), strict=True).load_meta(json.loads(json.dumps(said)))
    resumed = make_engine(case, EVENTS, folder=folder / "run", resume="latest")
    resumed.fit()
    started = make_engine(case, {"run": EVENTS["run"]}, folder=folder / "new")
    started.fit(steps=0)
    return Remembered(said, _meta(new), _meta(resumed.run.monitors), _meta(started.run.monitors))


def _meta(monitors: Sequence[Monitor]) -> dict[str, Any]:
    return dict(Events(monitors, StopRequest(), strict=True).meta())


@check("monitor", since="0.2")
def publishes_what_it_declares(case: Case) -> None:
    """Every metric that it publishes is declared, of its kind, the same on every rank, and told under its
    name."""
    ranks = told_to_ranks(case)
    component = case.registry().get("monitor", case.use)
    names = Names(component.metrics)
    for rank, reports in enumerate(ranks):
        assert repr(reports) == repr(ranks[0]), f"rank {rank} was told {reports}, rank 0 {ranks[0]}"
    for name in dict.fromkeys(name for _, published in ranks[0] for name in published):
        assert names.find(name), f"'{name}' is published and not declared{names.near(name)}"


@check("monitor", since="0.3", applies=distributed)
def publishes_what_one_process_does(case: Case) -> None:
    """Of a run on several ranks it publishes the numbers that it publishes of the same run on one.

    Compared are histograms over the same bins, and numbers declared as those of a device, of layers or of
    weights. What the host has, as times, memory or how many ranks there are, may be different. Of a precision
    that rounds more than float32, on a layout that splits layers, only names and counts are compared.
    """
    component = case.registry().get("monitor", case.use)
    names = Names(component.metrics)
    (alone,) = told_to_ranks(case.alone())
    split = any(size > 1 for dim, size in case.topology.items() if dim != "dp")
    numbers = not split or case.recipe().precision.use in FINE
    of_step: dict[int, dict[str, Any]] = {}
    for step, published in told_to_ranks(case)[0]:
        of_step.setdefault(step, {}).update(published)  # a step's, and what an evaluation after it adds
    for step, want in alone:
        got = of_step.get(step, {})
        for name, value in want.items():
            declared = names.find(name)
            if isinstance(value, Histogram) or (declared is not None and declared.cost != "host"):
                problem = _difference(value, got.get(name), numbers=numbers)
                assert not problem, f"step {step}: '{name}' {problem}; is it published on every rank?"


def _difference(want: Any, got: Any, *, numbers: bool) -> str:
    """Return how a published value is not that of one process; empty if it is, to rounding.

    Without ``numbers``, one that is no histogram need only be there.
    """
    if got is None:
        return "is published on one process and not on several ranks"
    if isinstance(want, Histogram) and isinstance(got, Histogram):
        counted = [(*each.counts, each.below, each.above, each.nan) for each in (want, got)]
        same_bins = want.edges == got.edges
        # Rounding takes few elements over the edge of a bin, and adds none.
        if same_bins and not math.isclose(sum(counted[0]), sum(counted[1]), rel_tol=ROUNDING):
            return f"counts {sum(counted[1]):g} elements, on one process {sum(counted[0]):g}"
        return ""
    if not numbers or not isinstance(want, float) or repr(want) == repr(got):
        return ""
    if not math.isclose(want, got, rel_tol=ROUNDING, abs_tol=1e-9):
        return f"is {got!r}, on one process {want!r}"
    return ""


@check("monitor", since="0.2")
def publishing_waits_for_nothing(case: Case) -> None:
    """What it publishes of the device is published as it is: numbers are read by the core, not by the
    monitor."""
    for rank, waited in enumerate(run_ranks(waits, case.world_size, case, EVENTS)):
        assert not waited, f"rank {rank} reads a number of the device while it publishes: {waited[0]}"


def told_to_ranks(case: Case) -> list[list[tuple[int, dict[str, Any]]]]:
    """Return what :func:`told` does of each rank, of which the last few are kept."""
    key = repr((case.tables(**EVENTS), case.plugins, case.world_size))
    if key not in _told:
        if len(_told) == KEPT:
            del _told[next(iter(_told))]
        _told[key] = run_ranks(told, case.world_size, case, EVENTS)
    return _told[key]


#: Runs that are kept: many layouts are compared with one run in one process.
KEPT = 4
_told: dict[str, list[list[tuple[int, dict[str, Any]]]]] = {}


def told(case: Case, changes: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """Return by step what monitors published, as a sink receives it."""
    seen = Published()
    with tempfile.TemporaryDirectory() as folder:
        make_engine(case, changes, folder=Path(folder), callbacks=[seen]).fit()
    return seen.told


class Published(Monitor):
    """Keeps published metrics except those measured in seconds, which differ between runs."""

    reads_weights = False

    def __init__(self) -> None:
        self.told: list[tuple[int, dict[str, Any]]] = []

    def on_metrics(self, report: MetricsReport) -> None:
        found = {**report.values, **report.histograms, **report.texts}
        if report.published:
            self.told.append((report.step, {name: found[name] for name in sorted(report.published)}))


def waits(case: Case, changes: dict[str, Any]) -> list[str]:
    """Return where the monitor reads a tensor's value in an event in which it publishes."""
    engine = make_engine(case, changes)
    watch = Reads(engine)
    for monitor in engine.events.monitors:
        for event in ("on_before_update", "on_step"):
            setattr(monitor, event, watch.around(getattr(monitor, event)))
    engine.fit()
    return watch.found


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records calls that read a tensor on the host, in an event that publishes something."""

    def __init__(self, engine: RuntimeEngine) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.engine = engine
        self.found: list[str] = []
        self._now: list[str] = []

    def around(self, event: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``event``, wrapped."""

        def watched(report: Any) -> Any:
            self._now = []
            reducer = self.engine.monitoring.reducer
            before = {*reducer.gathered}, bytes(reducer.table.sums)
            with self:
                answer = event(report)
            if ({*reducer.gathered}, bytes(reducer.table.sums)) != before:
                self.found += self._now
            return answer

        return watched

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and not _reads_host_memory():
            self._now.append("".join(traceback.format_stack()[-4:-1]).strip())
        return func(*args, **(kwargs or {}))


def _reads_host_memory() -> bool:
    """Return whether the core reads, which it does only for tensors in host memory."""
    return any(frame.f_code is gathered.read.__code__ for frame, _ in traceback.walk_stack(None))
