"""Predicted time of a step: each action by what it computes, moves and sends, then the schedule simulator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import attrs

from nanotrain_core.api import Action, Durations, Timeline, simulate
from nanotrain_plan.comms import CollectiveTime, Links, attention_seconds
from nanotrain_plan.dry.cost import ATTENTION
from nanotrain_plan.dry.phase import Phase
from nanotrain_plan.dry.rank import Sort, place_of
from nanotrain_plan.hardware import Hardware
from nanotrain_plan.stages import Stages


@attrs.define(frozen=True, kw_only=True)
class PhaseTime:
    """Seconds of one action, or of what a step does around its actions."""

    gemm: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    """Of operators that move numbers and compute little."""
    communication: float = 0.0
    """Not hidden."""
    host: float = 0.0
    """In which the device waits for the host to launch operators."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.gemm + self.attention + self.memory + self.communication + self.host


KINDS = tuple(field.name for field in attrs.fields(PhaseTime))


@attrs.define(frozen=True, kw_only=True)
class SortDurations(Durations):
    """What each sort of action takes in the schedule.

    A backward pass with weight gradients has a time of its own, which is not a sum of two others, and so has
    the last microbatch, which may have fewer sequences.
    """

    times: Mapping[Sort, float]
    microbatches: int

    def of(self, action: Action, *, split: bool) -> float:
        """Return the seconds of an action."""
        place = place_of(action.microbatch, self.microbatches)
        return self.times[action.kind, action.stage, place, split]


@attrs.define(frozen=True, kw_only=True)
class StepTime:
    """Times of one optimizer step, in seconds."""

    seconds: float
    pipeline: float
    """From the beginning of the first action to the end of the last, over all ranks."""
    bubble: float
    """Share of :attr:`pipeline` that ranks wait, on average."""
    after: float
    """Gradient sync that is left after backward, the optimizer and the rest."""
    busiest: PhaseTime
    """What the pipeline rank with most to do spends its actions on."""
    timeline: Timeline
    durations: Durations
    """Of the actions."""


def phase_time(phase: Phase, hardware: Hardware, collectives: CollectiveTime) -> PhaseTime:
    """Return what a phase takes; ``collectives``: seconds of its own.

    Computation hides gradient sync for as long as it takes itself; what is left of it is exposed.
    Attention is counted over whole score matrices: half is masked, and a kernel leaves it out. Kernels run
    while the host launches the next, so of the two the slower one counts.
    """
    found = PhaseTime(
        gemm=sum(
            flops / hardware.rate(kind)
            for kind, flops in phase.gemm_flops.items()
            if not kind.startswith(ATTENTION)
        ),
        attention=attention_seconds(phase.gemm_flops, hardware),
        memory=(phase.moved - phase.eager) / hardware.traffic + phase.eager / hardware.eager_traffic,
    )
    not_hidden = max(0.0, collectives.hidden - found.total)
    found = attrs.evolve(found, communication=collectives.exposed + not_hidden)
    launching = phase.kernels / hardware.memory.fusion * hardware.launch_us * 1e-6
    return attrs.evolve(found, host=max(0.0, launching - found.total))


def step_time(
    stages: Stages, hardware: Hardware, collectives: Callable[[Phase], CollectiveTime] | None = None
) -> StepTime:
    """Simulate a step; ``collectives``: what those of a phase take, if not the recorded ones."""
    of = Timer(stages, hardware, collectives)
    times, busiest = _of_actions(stages, of)
    message = _longest_message(stages, collectives or Links(hardware, stages.layout).time)
    of_actions = SortDurations(times=times, microbatches=stages.microbatches, p2p=message)
    timeline = simulate(stages.actions, of_actions)
    after, pipeline = _longest_after(stages, of), timeline.makespan
    return StepTime(
        seconds=pipeline + after,
        pipeline=pipeline,
        bubble=timeline.bubble(),
        after=after,
        busiest=busiest,
        timeline=timeline,
        durations=of_actions,
    )


def least_time(
    stages: Stages, hardware: Hardware, collectives: Callable[[Phase], CollectiveTime] | None = None
) -> float:
    """Return the seconds of a step whose busiest pipeline rank never waits."""
    of = Timer(stages, hardware, collectives)
    return _of_actions(stages, of)[1].total + _longest_after(stages, of)


class Timer:
    """Gives the time of a phase, and remembers it.

    Gradient sync and all-gathers of weights that a pass hides are limited by its own computation, and after
    all passes they are not hidden. The update's all-gathers are not limited: they overlap with the next
    forward pass. If gradient sync does not overlap, nothing hides its sums, nor these all-gathers.

    Operators that are not compiled are not fused, as those of the optimizer and of gradient sync. Passes that
    are replayed as a CUDA graph wait for no host.
    """

    def __init__(
        self,
        stages: Stages,
        hardware: Hardware,
        collectives: Callable[[Phase], CollectiveTime] | None = None,
    ) -> None:
        """``collectives``: see :func:`step_time`."""
        self.eager = attrs.evolve(hardware, memory=attrs.evolve(hardware.memory, fusion=1.0))
        self.of_passes = hardware if stages.compiled else self.eager
        if stages.captured:
            self.of_passes = attrs.evolve(self.of_passes, launch_us=0.0)
        self.collectives = collectives or Links(hardware, stages.layout).time
        steps = stages.steps.values()
        self.around = {id(phase) for step in steps for phase in step.around.values()}
        forward = {id(p) for step in steps for (kind, *_), p in step.measured.items() if kind == "F"}
        self.after = {id(step.around["sync"]) for step in steps}
        self.not_limited = self.around - self.after
        updates = {id(step.around["update"]) for step in steps if "update" in step.around}
        self.overlapped = all(step.overlapped for step in steps)
        self.other = forward | self.not_limited - updates  # no sums of gradients, no all-gathers of an update
        self._known: dict[tuple[int, bool], PhaseTime] = {}

    def __call__(self, phase: Phase, *, synced: bool = True) -> PhaseTime:
        """Return what a phase takes; if not ``synced``, without the seconds of its gradient sync."""
        key = id(phase), synced
        if key not in self._known:
            found = self.collectives(phase)
            if self._takes_turns(phase):
                exposed, sync = found.exposed + found.hidden, found.sync + found.hidden
                found = attrs.evolve(found, exposed=exposed, sync=sync, hidden=0.0)
            if id(phase) in self.not_limited:
                found = attrs.evolve(found, hidden=0.0)
            if not synced:
                found = attrs.evolve(found, exposed=found.exposed - found.sync, hidden=0.0)
            hardware = self.eager if id(phase) in self.around else self.of_passes
            self._known[key] = phase_time(phase, hardware, found)
        return self._known[key]

    def _takes_turns(self, phase: Phase) -> bool:
        """Return whether gradient sync is waited for where it is sent: copies and sums take turns."""
        return id(phase) in self.after or not (self.overlapped or id(phase) in self.other)

    def excess(self, phase: Phase) -> float:
        """Return the seconds of gradient sync that a phase should hide, but computes for too short a time."""
        return max(0.0, self(phase).communication - self.collectives(phase).exposed)


def _of_actions(stages: Stages, of: Timer) -> tuple[dict[Sort, float], PhaseTime]:
    """Return seconds by sort of action, and what the pipeline rank with most to do spends."""
    times: dict[Sort, float] = {}
    busiest = PhaseTime()
    for pp_rank in range(stages.pp):
        spent = []
        for sort, count in Counter(stages.sorts[pp_rank].values()).items():
            time = _in_pipeline(stages, pp_rank, sort, of)
            times[sort] = time.total
            spent.append((time, count))
        busiest = max(busiest, _sum(spent), key=lambda time: time.total)
    return times, busiest


def _in_pipeline(stages: Stages, pp_rank: int, sort: Sort, of: Timer) -> PhaseTime:
    """Return what an action takes in the schedule.

    For gradient sync in the last microbatch's no other stage waits: it comes after the schedule, as far as
    the pass does not hide it. See :func:`_after`.
    """
    return of(stages.phase_of(pp_rank, sort), synced=not _syncs_last(stages, sort))


def _syncs_last(stages: Stages, sort: Sort) -> bool:
    """Return whether it is a backward pass of the last microbatch, or of the only one."""
    return sort[0] != "F" and (sort[2] == 2 or stages.microbatches == 1)


def _longest_message(stages: Stages, collectives: Callable[[Phase], CollectiveTime]) -> float:
    """Return the seconds in which a microbatch in the middle travels between two stages, at most."""
    phases = {
        id(phase): phase
        for pp_rank, sorts in enumerate(stages.sorts)
        for sort in set(sorts.values())
        for phase in [stages.phase_of(pp_rank, (*sort[:2], 1, sort[3]))]
    }
    return max((collectives(phase).message for phase in phases.values()), default=0.0)


def _sum(spent: Iterable[tuple[PhaseTime, int]]) -> PhaseTime:
    spent = list(spent)
    return PhaseTime(**{kind: sum(n * getattr(time, kind) for time, n in spent) for kind in KINDS})


def _longest_after(stages: Stages, of: Timer) -> float:
    return max(
        _after(stages, pp_rank, {key: of(phase).total for key, phase in _around(stages, pp_rank).items()}, of)
        for pp_rank in range(stages.pp)
    )


def _around(stages: Stages, pp_rank: int) -> Mapping[str, Phase]:
    return stages.step_of(pp_rank).around


def _after(stages: Stages, pp_rank: int, around: Mapping[str, float], of: Timer) -> float:
    """Return what follows a rank's actions, and what the last microbatch adds to a backward pass."""
    extra = 0.0
    for sort in stages.sorts[pp_rank].values():
        if _syncs_last(stages, sort):
            here = of(stages.phase_of(pp_rank, sort)).total
            extra += here - _in_pipeline(stages, pp_rank, sort, of).total
    return extra + sum(around.values())
