"""One rank's run composed on ``meta``, and one of its steps, measured action by action."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import attrs
import torch
from torch.utils._python_dispatch import _disable_current_modes

from nanotrain_core.api import Action, Layout, Recipe, Registry, Selection
from nanotrain_core.api.torch import (
    PackedWeight,
    Run,
    compose,
    dequantize,
    requantize,
)
from nanotrain_plan.dry.held import Owned, Share, frozen_bytes, held_by, held_of_parts, saved_bytes
from nanotrain_plan.dry.phase import Phase
from nanotrain_plan.dry.recorder import Recorder
from nanotrain_plan.dry.step import AROUND, DryStep
from nanotrain_plan.dry.values import Values
from nanotrain_plan.dry.world import DryMesh, Surveyed, fake_world

#: Kind and stage of an action, whether its microbatch is the step's first (0), last (2) or another (1), and
#: whether the stage has a W pass for it.
Sort = tuple[str, int, int, bool]


@attrs.define(frozen=True, kw_only=True, eq=False)
class RankStep:
    """What one rank holds and does."""

    rank: int
    coordinates: Mapping[str, int]
    state: Mapping[str, int]
    """Bytes between steps, by holder."""
    parameters: Mapping[str, int]
    """Elements of this rank's blocks, by parameter."""
    global_parameters: Mapping[str, int]
    """Elements of the whole parameters that this rank has blocks of."""
    measured: Mapping[Sort, Phase]
    """One action of each sort."""
    around: Mapping[str, Phase]
    """By :data:`AROUND`, as far as they were taken."""
    saved: float
    """Bytes of a checkpoint that this rank stands for: of what several ranks hold, its share."""
    saved_packed: float
    """Bytes of a copy of that in memory, where packed weights are packed."""
    frozen: float
    """Of :attr:`saved`, bytes of frozen weights, which a format may share between checkpoints."""
    frozen_packed: float
    """Of :attr:`saved_packed`, likewise."""
    descriptions: Mapping[str, Sequence[str]]
    """See :class:`~nanotrain_core.compose.Run`."""
    phases: Sequence[Phase] = ()
    """Of the step that was taken, in order."""
    shares: Mapping[tuple[int, tuple[str, ...]], Share] = attrs.field(factory=dict)
    """By model part, numbered as this rank has them, and by mesh dimensions that gradients are summed over;
    ``pp`` among them where another stage holds the parameter too."""
    owned: Mapping[tuple[str, ...], Owned] = attrs.field(factory=dict)
    """By those dimensions."""
    sharded: bool = False
    """Whether ranks that read different sequences hold different rows of weights."""
    starting: int = 0
    """Most bytes alive while the run starts, or loads a checkpoint, if a precision packs weights; else 0: a
    step takes more."""
    copied: int = 0
    """Bytes of :attr:`Owned.weights` together."""
    overlapped: bool = True
    """Whether gradient sync sends buckets while a backward pass computes the next ones, and has updated
    weights gathered during the next forward pass."""
    looked: Any = None
    """What ``look`` of :func:`dry_rank` returned."""
    _derived: dict[Sort, Phase | None] = attrs.field(factory=dict, init=False)

    def phase(self, sort: Sort) -> Phase:
        """Return what was measured for an action, or for one as near as there is.

        A backward pass without weight gradients stands for no whole one, wherever in a step. A forward pass
        is the same with either, but may differ by its place. In the last microbatch the pass that computes
        weight gradients has the gradient sync that was measured in the other such pass.
        """
        kind, stage, place, split = sort
        derived = None if sort in self.measured else self._with_sync(sort)
        if derived is not None:
            return derived
        places, halves = (place, 1, 0, 2), (split, not split)
        if kind == "F":
            wanted = [(near, half) for near in places for half in halves]
        else:
            wanted = [(near, half) for half in halves for near in places]
        for near, half in wanted:
            if (kind, stage, near, half) in self.measured:
                return self.measured[kind, stage, near, half]
        raise KeyError(sort)

    def _with_sync(self, sort: Sort) -> Phase | None:
        """Return a pass of a microbatch in the middle with the gradient sync of the last one.

        It is None if this is not what is missing, or not known either. The same object is returned each time.
        """
        kind, stage, place, split = sort
        if place != 2 or kind == "F" or (kind == "B" and split):
            return None
        if sort not in self._derived:
            other: tuple[str, int] = ("B" if kind == "W" else "W"), stage
            usual = self.measured.get((kind, stage, 1, split))
            last, *before = (self.measured.get((*other, at, not split)) for at in (2, 1, 0))
            between = next((phase for phase in before if phase is not None), None)
            if usual is None or last is None or (between is None and kind == "W"):
                self._derived[sort] = None
            else:
                self._derived[sort] = usual.with_sync_of(last, between)
        return self._derived[sort]


def place_of(microbatch: int, microbatches: int) -> int:
    """Return the place of a microbatch in its step: 0 of the first (and only) one, 2 of the last, else 1."""
    return 0 if microbatch == 0 else 2 if microbatch == microbatches - 1 else 1


def sorts_of(actions: Sequence[Action], microbatches: int) -> dict[Action, Sort]:
    """Return the sort of each action of a rank."""
    split = {(action.stage, action.microbatch) for action in actions if action.kind == "W"}
    return {
        action: (
            action.kind,
            action.stage,
            place_of(action.microbatch, microbatches),
            (action.stage, action.microbatch) in split,
        )
        for action in actions
    }


def sample(actions: Sequence[Action], microbatches: int) -> list[int]:
    """Return microbatches that have an action of every sort: the first, the last, and few between."""
    sorts = sorts_of(actions, microbatches)
    chosen = sorted({0, microbatches - 1})
    covered = {sort for action, sort in sorts.items() if action.microbatch in chosen}
    middle = microbatches // 2
    for action in sorted(sorts, key=lambda action: abs(action.microbatch - middle)):
        if sorts[action] not in covered:
            chosen.append(action.microbatch)
            covered |= {sort for each, sort in sorts.items() if each.microbatch == action.microbatch}
    return sorted(chosen)


def dry_recipe(recipe: Recipe, registry: Registry, *, host: bool) -> Recipe:
    """Return the recipe with what a dry run has in place of data, kernels and monitors.

    ``host``: whether ranks are CPUs.
    """

    def stand_in(kind: str, use: str, **config: Any) -> Selection:
        return Selection(kind, use, registry.get(kind, use).config(**config))

    precision = recipe.precision
    if hasattr(precision.config, "backend"):  # of FP8: on meta auto stands for the kernels of a GPU
        backend = "emulated" if host else "auto"
        precision = attrs.evolve(precision, config=attrs.evolve(precision.config, backend=backend))
    optimizer = recipe.optimizer
    if hasattr(optimizer.config, "offload"):  # state on the host is counted there: see host.py
        optimizer = attrs.evolve(optimizer, config=attrs.evolve(optimizer.config, offload=False))
    return attrs.evolve(
        recipe,
        optimizer=optimizer,
        run=attrs.evolve(recipe.run, weights=None, compile=False, cuda_graphs=False),
        kernels=stand_in("kernels", "dry", host=host),
        data=stand_in("data", "synthetic", vocab=2, branching=1, sequences=1, validation_sequences=0),
        precision=precision,
        monitor=(),
    )


def compose_dry(
    recipe: Recipe,
    registry: Registry,
    rank: int,
    told: list[Any] | None,
    *,
    host: bool,
    lasting: bool = True,
) -> Run:
    """Return the run of a rank on ``meta``; call it in a :func:`fake_world`."""
    make = partial(DryMesh, told=told, host=host, lasting=lasting)
    return compose(recipe, registry, rank=rank, device="meta", make_mesh=make)


def survey(recipe: Recipe, registry: Registry, ranks: Iterable[int], *, host: bool) -> list[Any]:
    """Return what each of ``ranks``, one for each pipeline stage, tells the others: names of parameters."""
    told: list[Any] = []
    for rank in ranks:
        with fake_world(rank, recipe.run.ranks):
            try:
                compose_dry(recipe, registry, rank, None, host=host)
            except Surveyed as said:
                told += said.args
    return told


def dry_rank(
    recipe: Recipe,
    registry: Registry,
    layout: Layout,
    rank: int,
    told: list[Any],
    values: Values,
    *,
    host: bool,
    lasting: bool = True,
    every_microbatch: bool = False,
    updates: bool = True,
    look: Callable[[Run], Any] | None = None,
) -> RankStep:
    """Compose a rank and run a step of it.

    Args:
        recipe: of :func:`dry_recipe`.
        registry: the plugins.
        layout: of the recipe.
        rank: which.
        told: of :func:`survey`.
        values: shared by the ranks of a plan, in the order of the pipeline.
        host: whether it is to be a CPU.
        lasting: whether it holds what it sends, see :class:`DryMesh`.
        every_microbatch: take a step of all of them, not only of those that stand for others.
        updates: false leaves out the optimizer's update, and what follows it.
        look: called with the composed run, before the step. Then the recorder also notes who asks for each
            collective.
    """
    recorder = Recorder("meta", values, origins=look is not None)
    with fake_world(rank, recipe.run.ranks), recorder, recorder.watching_modules():
        recorder.enter("compose")
        run = compose_dry(recipe, registry, rank, told, host=host, lasting=lasting)
        recorder.named({m: name for part in run.stages.values() for name, m in part.named_modules()})
        with _disable_current_modes():  # views of what is there, many thousands
            blocks = list(run.optimizer.blocks())
        state = held_by(run, recorder, blocks)
        saved, saved_packed = saved_bytes(run, blocks)
        frozen, frozen_packed = frozen_bytes(run)
        starting = _starting(run, recorder, sum(state.values()))
        shares, owned = held_of_parts(run, blocks)
        looked = look(run) if look else None
        step = DryStep(run, recorder)
        sorts, sampled = sorts_of(run.actions, step.count), sample(run.actions, step.count)
        if every_microbatch:
            sampled = list(range(step.count))
        first = len(recorder.phases)
        step.run(sampled, forward_first=not every_microbatch and _runs_ahead(run.actions), updates=updates)
        recorder.enter("end")
        recorder.settle(first)
    phases = {phase.name: phase for phase in recorder.phases[first:]}
    measured: dict[Sort, Phase] = {}
    for action in step.executor_actions:
        whole = attrs.evolve(action, microbatch=sampled[action.microbatch])
        measured.setdefault(sorts[whole], phases[str(action)])
    return RankStep(
        rank=rank,
        coordinates={dim: layout.coordinate(rank, dim) for dim in layout.dims},
        state=state,
        parameters={p.placement.name: p.parameter.numel() for p in run.placed},
        global_parameters={p.placement.name: _product(p.placement.global_shape) for p in run.placed},
        measured=measured,
        around={name: phases[name] for name in AROUND if name in phases},
        saved=saved,
        saved_packed=saved_packed,
        frozen=frozen,
        frozen_packed=frozen_packed,
        descriptions=run.descriptions,
        shares=shares,
        owned=owned,
        sharded=any(placed.placement.sharded & _dims_of_rows(layout) for placed in run.placed),
        starting=starting,
        copied=sum(each.weights for each in owned.values()),
        phases=recorder.phases[first:-1],
        overlapped=run.gradients.needs_gradient_hooks,
        looked=looked,
    )


def _starting(run: Run, recorder: Recorder, state: int) -> int:
    """Return :attr:`RankStep.starting`: a packed weight is unpacked and packed, beside all that is held.

    A start from the beginning takes less, unless weights are trained: their masters are made of the values
    before packing, which are held until all are.
    """
    packed = [p.parameter for p in run.placed if isinstance(p.parameter, PackedWeight)]
    if not packed:
        return 0
    trained = sum(each.numel() * each.element_size() for each in packed if each.requires_grad)
    recorder.enter("load")
    largest = max(packed, key=torch.Tensor.numel)
    requantize(largest, dequantize(largest))
    return state + max(trained, recorder.phase.transient)


def _runs_ahead(actions: Sequence[Action]) -> bool:
    """Return whether a forward pass follows another one, so that two microbatches are in flight."""
    return any(one.kind == next_.kind == "F" for one, next_ in pairwise(actions))


def _product(shape: Iterable[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _dims_of_rows(layout: Layout) -> set[str]:
    """Return the dimensions along which ranks read different sequences, or into which a view divides them.

    Those of experts alone are not among them.
    """
    return {*layout.data_dims} - {*layout.sequence_dims} - layout.expert_dims
