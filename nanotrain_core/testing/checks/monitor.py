"""A monitor watches. With or without it, a run has the same numbers."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanotrain_core.contracts import Monitor
from nanotrain_core.run.events import Events
from nanotrain_core.run.stop import StopRequest
from nanotrain_core.testing.case import Case
from nanotrain_core.testing.checks import check
from nanotrain_core.testing.checks.parallel import assert_same_reports
from nanotrain_core.testing.compare import assert_bitwise, whole
from nanotrain_core.testing.pool import run_ranks
from nanotrain_core.testing.probe import Trace, make_engine, make_run, train

#: A run in which every event happens.
EVENTS = {"run": {"steps": 4}, "evaluation": {"every": 2, "sequences": 8}}


def traces(case: Case, changes: dict[str, Any], **options: Any) -> list[Trace]:
    """Train in a run folder of its own."""
    with tempfile.TemporaryDirectory() as name:
        found: list[Trace] = run_ranks(
            train, case.world_size, case, changes, folder=Path(name), save_at=2, **options
        )
        return found


def assert_same_run(watched: list[Trace], alone: list[Trace]) -> None:
    """Compare losses, gradient norms and weights, bit for bit."""
    for rank, (one, other) in enumerate(zip(watched, alone, strict=True)):
        assert_same_reports(one, other, atol=0.0)
        assert_bitwise(whole([one.weights]), whole([other.weights]), f"weights of rank {rank}")


@check("monitor", since="0.1")
def changes_nothing(case: Case) -> None:
    """With and without the monitor, losses, weights and random-number streams are bitwise the same."""
    watched, alone = traces(case, EVENTS), traces(case, {**EVENTS, "monitor": []})
    assert_same_run(watched, alone)
    for rank, (one, other) in enumerate(zip(watched, alone, strict=True)):
        assert_bitwise(one.streams, other.streams, f"random-number streams of rank {rank}")


@check("monitor", since="0.1")
def its_failure_does_not_stop_training(case: Case) -> None:
    """A run in which the monitor fails at every event has the numbers of a run without it."""
    failing = traces(case, EVENTS, failing_monitors=True)
    assert_same_run(failing, traces(case, {**EVENTS, "monitor": []}))


@check("monitor", since="0.1")
def works_without_a_folder(case: Case) -> None:
    """In a run that saves nothing, and logs only every second step, the monitor does without."""

    ranks = run_ranks(train, case.world_size, case, {"run": {"log_every": 2, "steps": 3}})
    assert [r.step for r in ranks[0].reports] == [2, 3], (
        f"reports of steps {[r.step for r in ranks[0].reports]}"
    )


@check("monitor", since="0.2")
def what_it_remembers_comes_back(case: Case) -> None:
    """``meta`` is JSON, the same on every rank, and a new monitor that is given it says the same."""
    with tempfile.TemporaryDirectory() as name:
        ranks = run_ranks(remembered, case.world_size, case, Path(name))
    for rank, (said, again) in enumerate(ranks):
        assert said == ranks[0][0], f"rank {rank} would remember {said}, rank 0 {ranks[0][0]}"
        assert again == said, f"rank {rank}: given {said}, a new monitor says {again}"


def remembered(case: Case, folder: Path) -> tuple[str, str]:
    """Return what the monitors of a run say at its end, and what new ones say that were told it."""
    engine = make_engine(case, EVENTS, folder=folder)
    engine.fit()
    said = _said(engine.run.monitors)
    new = make_run(case, EVENTS).monitors
    Events(new, StopRequest(), strict=True).load_meta(json.loads(said))
    return said, _said(new)


def _said(monitors: Sequence[Monitor]) -> str:
    return json.dumps(Events(monitors, StopRequest(), strict=True).meta(), sort_keys=True)
