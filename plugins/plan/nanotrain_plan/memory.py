"""Memory of a rank over a step: what is held between steps, and what its list of actions adds and frees.

Each action was measured once (:mod:`nanotrain_plan.dry.rank`); the rank's whole list says when it runs, so
that activations of all microbatches in flight count, and the peak is where the schedule has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import accumulate, pairwise

import attrs

from nanotrain_core.api import Action, Recipe
from nanotrain_plan.budget import offloads_state
from nanotrain_plan.dry.phase import Phase, Storage
from nanotrain_plan.dry.rank import RankStep
from nanotrain_plan.stages import Stages


@attrs.define(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of one rank. Those of holders at the peak add up to :attr:`peak`."""

    pp_rank: int
    held: Mapping[str, int]
    """At the peak: ``weights``, ``masters``, ``optimizer``, ``gradients``, ``activations`` (kept for
    backward), ``buffers`` (what a step keeps beside these, as weights quantized for it), ``transient``
    (within the action or the update itself) and ``other``."""
    state: Mapping[str, int]
    """Between steps, by holder: ``weights``, ``masters``, ``optimizer``, ``gradients``, ``buffers`` (that one
    step leaves to the next: buckets of gradient sync, quantized tensors, its batch) and ``other``."""
    peak: int
    where: str
    """What runs at the peak: an action as ``F0.3``, or ``gradient sync``, ``optimizer step``, or ``start or
    resume``."""
    in_flight: int
    """Most microbatches (of any stage) whose activations are held at once."""
    timeline: Sequence[tuple[str, int]]
    """Bytes after each action, and the action."""


@attrs.define(frozen=True, kw_only=True)
class Activation:
    """Tensors that a forward pass keeps for backward, alike in all but their number."""

    module: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    """Of one."""
    count: int
    recomputable: bool
    """Whether it is a pointwise function (a cast, SiLU) of one tensor that is kept as well. Eager layers keep
    both, fused kernels the other one alone, which is how published accounts count."""


#: What follows the actions of a step, as it is told.
AFTER = {"sync": "gradient sync", "update": "optimizer step", "balance": "expert balance"}


@attrs.define(frozen=True, kw_only=True)
class StageActivations:
    """What a forward pass of one microbatch keeps for backward, of stages that are alike."""

    stages: Sequence[int]
    measured: int
    """The one of them whose modules the tensors name."""
    tensors: Sequence[Activation]

    @property
    def bytes(self) -> int:
        """Of one microbatch."""
        return sum(each.bytes * each.count for each in self.tensors)

    @property
    def recomputable(self) -> int:
        """The bytes that fused kernels do not keep: see :attr:`Activation.recomputable`."""
        return sum(each.bytes * each.count for each in self.tensors if each.recomputable)

    @property
    def layers(self) -> dict[str, int]:
        """The bytes by layer of the stage :attr:`measured`: ``layers.7``, ``embed``, ``head``."""
        total: Counter[str] = Counter()
        for each in self.tensors:
            parts = each.module.split(".")
            layer = ".".join(parts[:2]) if len(parts) > 1 and parts[1].isdigit() else parts[0] or "outside"
            total[layer] += each.bytes * each.count
        return dict(total)


def rank_memory(stages: Stages, pp_rank: int, *, offloaded: bool = False) -> RankMemory:
    """Walk through a rank's actions.

    ``offloaded``: masters and optimizer state are on the host. A dry run has them on the device, whatever
    ``optimizer.offload`` says, so ``stages`` cannot tell.
    """
    found = _or_at_start(_on_device(stages, pp_rank), stages.step_of(pp_rank))
    gone = {"masters": 0, "optimizer": 0} if offloaded else {}
    moved = sum(found.state[name] for name in gone)
    return attrs.evolve(
        found,
        peak=found.peak - moved,
        held={**found.held, **gone},
        state={**found.state, **gone},
        timeline=[(name, level - moved) for name, level in found.timeline],
    )


def _or_at_start(found: RankMemory, step: RankStep) -> RankMemory:
    """Return the memory of a step, with the peak of the run's start if that is higher."""
    if step.starting <= found.peak:
        return found
    held = {**step.state, "activations": 0, "buffers": 0}
    held["transient"] = step.starting - sum(held.values())
    return attrs.evolve(found, peak=step.starting, where="start or resume", held=held)


def _on_device(stages: Stages, pp_rank: int) -> RankMemory:
    step = stages.step_of(pp_rank)
    # The first step of a run makes what later ones find there, and the highest peak is that of a later one.
    buffers = sum(phase.lasting for phase in (*step.measured.values(), *step.around.values()))
    base = sum(step.state.values()) + buffers
    level, gradients, activations, flying, most = base, 0, 0, 0, 0
    peak, where, timeline = base, "between steps", [("", base)]
    held = {**step.state, "activations": 0, "buffers": buffers, "transient": 0}

    def change_of(phase: Phase) -> int:
        return phase.after - phase.before - phase.lasting

    def look(phase: Phase, name: str) -> None:
        nonlocal peak, where, held
        transient = max(0, phase.transient - phase.lasting)
        if level + transient > peak:
            peak, where = level + transient, name
            # A forward pass peaks with what it keeps for backward in place, or most of it.
            own = min(transient, change_of(phase)) if name[0] == "F" else 0
            held = {**step.state, "activations": activations + own, "buffers": buffers}
            held["transient"] = transient - own
            held["gradients"] = step.state["gradients"] + gradients

    split = {(a.stage, a.microbatch) for a in stages.actions[pp_rank] if a.kind == "W"}
    kept: dict[tuple[int, int], int] = {}
    phase_of = cache(partial(stages.phase_of, pp_rank))
    gathered = _Gathered.all_of(stages, pp_rank) if step.sharded else {}
    look(step.around["counts"], "token counts")
    for action in stages.actions[pp_rank]:
        phase = phase_of(stages.sorts[pp_rank][action])
        if gathered:
            alike, more = gathered[action.stage].before(action, phase)
            look(alike, str(action))
            level, activations = level + more, activations + more
        look(phase, str(action))
        change = change_of(phase)
        level += change
        key = action.stage, action.microbatch
        if action.kind == "F":
            kept[key] = change
            activations += change
            flying, most = flying + 1, max(most, flying + 1)
        elif action.kind == "B" and key in split:
            kept[key] += change
            activations += change
        else:
            done = kept.pop(key)
            activations -= done
            left = min(change + done, phase.made - phase.lasting)
            gradients += left
            buffers += change + done - left
            flying -= 1
        timeline.append((str(action), level))
    for name, told in AFTER.items():
        phase = step.around[name]
        look(phase, told)
        level += change_of(phase)
        if name == "sync":
            gradients += change_of(phase)
    return RankMemory(
        pp_rank=pp_rank,
        held=held,
        state=_between_steps(step),
        peak=peak,
        where=where,
        in_flight=most,
        timeline=timeline,
    )


@attrs.define
class _Gathered:
    """Weights of a stage that a forward pass gathers, and the backward pass after it frees.

    Which passes find them there depends on the order of passes, which in a whole step is another one than in
    the step that was taken.
    """

    bytes: int
    found_by: set[str]
    """Phases of that step that found them there."""
    forward: Phase
    """Its first forward pass, which gathered them."""
    backward: Phase
    """Its first backward pass, which found them there."""
    there: bool = False

    @classmethod
    def all_of(cls, stages: Stages, pp_rank: int) -> dict[int, _Gathered]:
        """Return those of a pipeline rank, by stage."""
        return {stage: cls.of(stages, pp_rank, stage) for stage in stages.stages_of(pp_rank)}

    @classmethod
    def of(cls, stages: Stages, pp_rank: int, stage: int) -> _Gathered:
        """Return those of a stage: what the first forward pass keeps for backward, and others do not."""
        number = f"{stages.as_measured(pp_rank, stage)}."
        phases = [each for each in stages.step_of(pp_rank).phases if each.name[1:].startswith(number)]
        pairs = [(before.name[0], after.name) for before, after in pairwise(phases)]
        forward, *others = [each for each in phases if each.name[0] == "F"]
        first, other = (
            sum(kept.bytes for kept in each.kept if kept.freed_in == f"B{each.name[1:]}")
            for each in (forward, others[0] if others else forward)
        )
        backward = next(each for each in phases if each.name[0] == "B")
        return cls(first - other, {after for before, after in pairs if before == "F"}, forward, backward)

    def before(self, action: Action, phase: Phase) -> tuple[Phase, int]:
        """Return a pass that finds them as ``action`` does, and the bytes that ``phase`` would have found."""
        missed = self.bytes * ((phase.name in self.found_by) - self.there)
        self.there = action.kind == "F"
        if not missed:
            return phase, 0
        return self.forward if self.there else self.backward, missed


def _between_steps(step: RankStep) -> dict[str, int]:
    """Return :attr:`RankMemory.state`: what a step leaves alive, and has no other holder, is buffers."""
    lasting = sum(phase.lasting for phase in (*step.measured.values(), *step.around.values()))
    left = step.around["balance"].after - sum(step.state.values())
    return {**step.state, "buffers": max(lasting, left)}


def most_on_host(stages: Stages) -> list[int]:
    """Return the most bytes of activations that wait in its host's memory, of each pipeline rank."""
    taken = ((stages.phase(pp_rank, each).host for each in own) for pp_rank, own in enumerate(stages.actions))
    return [max(accumulate(own)) for own in taken]


def kept_by_forward(stages: Stages, pp_rank: int, stage: int) -> list[Storage]:
    """Return the storages that a forward pass of one microbatch leaves, largest first.

    Not those that the next forward pass frees, such as an input that a module keeps in its newest quantized
    form: however many microbatches are in flight, there is one of them.
    """
    middle = stages.microbatches // 2 if stages.microbatches > 2 else 0
    phase = stages.phase(pp_rank, Action("F", stage, middle))
    kept = (storage for storage in phase.kept if storage.freed_in[:1] != "F")
    return sorted(kept, key=lambda storage: -storage.bytes)


def activations(stages: Stages, stage: int) -> StageActivations:
    """Return what one microbatch of a stage keeps, summed by module, operator, shape and dtype."""
    alike: Counter[tuple[str, str, tuple[int, ...], str, int, bool]] = Counter()
    for s in kept_by_forward(stages, stages.parts[stage].rank, stage):
        alike[s.module, s.op, s.shape, str(s.dtype)[6:], s.bytes, s.recomputable] += 1
    tensors = [
        Activation(
            module=module, op=op, shape=shape, dtype=dtype, bytes=size, count=count, recomputable=recomputable
        )
        for (module, op, shape, dtype, size, recomputable), count in alike.items()
    ]
    measured = stages.as_measured(stages.parts[stage].rank, stage)
    return StageActivations(stages=stages.alike()[measured], measured=measured, tensors=tensors)


def activations_by_stage(stages: Stages) -> list[StageActivations]:
    """Return the activations of every stage, of those that are alike once."""
    return [activations(stages, measured) for measured in stages.alike()]


def all_ranks(stages: Stages, recipe: Recipe) -> Iterator[RankMemory]:
    """Yield the memory of every pipeline rank's device, without what ``recipe`` keeps on the host."""
    for pp_rank in range(stages.pp):
        yield rank_memory(stages, pp_rank, offloaded=offloads_state(recipe))
