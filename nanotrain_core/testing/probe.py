"""Code that ranks run for a check: they train the case's recipe and return plain data for the parent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import attrs
import torch
import torch.distributed as dist
from structlog.testing import capture_logs

from nanotrain_core.compose import Run, compose
from nanotrain_core.contracts import (
    Block,
    EvaluationReport,
    Monitor,
    Optimizer,
    StepReport,
    StepStats,
    UpdateReport,
)
from nanotrain_core.engine import RuntimeEngine
from nanotrain_core.layout.initialization import initial_block
from nanotrain_core.layout.placement import Placement
from nanotrain_core.precision.quantized_storage import dequantize
from nanotrain_core.run import log, random_state
from nanotrain_core.run.random_state import stream_seed
from nanotrain_core.testing.case import Case
from nanotrain_core.testing.collectives import CollectiveLog, Entry


@attrs.define(frozen=True, eq=False)
class Trace:
    """The observations of one rank in a training run."""

    reports: list[StepReport]
    evaluations: list[float]
    """Validation losses."""
    gradients: list[Block]
    """Of the first step, complete, before clipping."""
    weights: list[Block]
    """After the last step."""
    state: list[Block]
    """Of the optimizer, after the last step."""
    meta: dict[str, Any]
    """Optimizer, loss scale and data, after the last step."""
    numbers: dict[str, float]
    """The optimizer's attributes that are numbers, with those of its ``inner``, after the last step."""
    streams: Mapping[str, torch.Tensor]
    """Random-number streams, after the last step."""
    collectives: list[Entry]
    offered: list[Block]
    """Gradients of the first step as a monitor is offered them; none unless asked for."""
    norms: list[dict[str, float]]
    """Of each parameter's gradient in every step, as a monitor is offered them; none unless asked for."""


class Reports(Monitor):
    """Keeps every report."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []
        self.evaluations: list[float] = []

    def on_step(self, report: StepReport) -> None:
        self.reports.append(report)

    def on_evaluation(self, report: EvaluationReport) -> None:
        self.evaluations.append(report.loss)


class Gradients(Monitor):
    """Keeps the gradients that monitors are offered: those of the first step, and the norms of all steps."""

    reads_weights = False

    def __init__(self) -> None:
        self.offered: list[Block] = []
        self.norms: list[dict[str, float]] = []

    def on_before_update(self, update: UpdateReport) -> None:
        if not self.norms:
            self.offered = copies(block for found in update.gradients() for block in found.blocks())
        self.norms.append(update.norms())


class Stand:
    """Wraps a component's object and delegates what it does not change."""

    def __init__(self, behind: Any) -> None:
        self.behind = behind

    def __getattr__(self, name: str) -> Any:
        return getattr(self.behind, name)


class FirstGradients(Stand):
    """An optimizer that keeps a copy of the gradients of its first step."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.optimizer)
        self.run = run
        self.first: list[Block] = []

    def step(self, **options: Any) -> StepStats:
        if not self.first:
            self.first = gradients(self.run)
        stats: StepStats = self.behind.step(**options)
        return stats


class SaveAt(Stand):
    """A checkpoint that is due after one step."""

    def __init__(self, behind: Any, step: int) -> None:
        super().__init__(behind)
        self.step = step

    def due(self, step: int) -> bool:
        return step == self.step


def rank() -> int:
    """Return this process's rank, 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def make_engine(case: Case, changes: Mapping[str, Any], **options: Any) -> RuntimeEngine:
    """Compose the case's recipe on this rank."""
    recipe = case.recipe(**changes)
    device = "cpu" if recipe.run.device == "auto" else recipe.run.device
    return RuntimeEngine.from_recipe(recipe, registry=case.registry(), rank=rank(), device=device, **options)


def make_run(case: Case, changes: Mapping[str, Any], **options: Any) -> Run:
    """Build the objects of the case's recipe on this rank, without an engine."""
    return compose(case.recipe(**changes), case.registry(), rank=rank(), **options)


def placements(case: Case) -> list[Placement]:
    """Return the placements of this rank's parameters."""
    return [placed.placement for placed in make_run(case, {}).placed]


def train(
    case: Case,
    changes: Mapping[str, Any],
    *,
    folder: Path | None = None,
    resume: str | None = None,
    save_at: int = 0,
    failing_monitors: bool = False,
    log_collectives: bool = False,
    watch_gradients: bool = False,
) -> Trace:
    """Train all the steps of the case's recipe.

    ``watch_gradients`` adds a monitor that reads them before each update.

    To log the collectives of process groups doubles the time of small models; where torch does not compare
    them (``run_ranks(check_collectives=False)``), ranks of one host use shared memory for most of theirs.
    """
    log.ensure(rank())
    random_state.seed_all(1, rank())
    engine = make_engine(case, changes, folder=folder, resume=resume)
    own, optimizer, seen, watch = engine.run.optimizer, FirstGradients(engine.run), Reports(), Gradients()
    checkpoint = SaveAt(engine.run.checkpoint, save_at)
    engine.run = attrs.evolve(engine.run, optimizer=cast(Optimizer, optimizer), checkpoint=checkpoint)
    engine.events.monitors = [*engine.events.monitors, *([watch] if watch_gradients else []), seen]
    if failing_monitors:
        engine.events.failures.strict = False
        engine.events.monitors = [*map(Failing, engine.run.monitors), seen]
    quiet = capture_logs() if failing_monitors else contextlib.nullcontext()
    collectives = CollectiveLog()
    with collectives if log_collectives else contextlib.nullcontext(), quiet:
        engine.fit()
    run = engine.run
    return Trace(
        reports=seen.reports,
        evaluations=seen.evaluations,
        gradients=optimizer.first,
        weights=weights(run),
        state=copies(run.optimizer.blocks()),
        meta={"optimizer": run.optimizer.meta(), "scale": run.loss_scale.meta(), "data": run.feed.meta()},
        numbers=numbers_of(own),
        streams=random_state.capture(torch.device("cpu")),
        collectives=collectives.entries,
        offered=watch.offered,
        norms=watch.norms,
    )


def numbers_of(optimizer: Optimizer) -> dict[str, float]:
    """Return the numbers that an optimizer holds itself, such as a count of steps, without a wrapper's."""
    while (behind := getattr(optimizer, "behind", None)) is not None:
        optimizer = behind
    inner = getattr(optimizer, "inner", None)
    held = {"": vars(optimizer), "inner.": vars(inner) if inner is not None else {}}
    held |= {f"group {n} ": group for n, group in enumerate(getattr(inner, "param_groups", ()))}
    pairs = [(f"{of}{name}", value) for of, each in held.items() for name, value in each.items()]
    return {name: value for name, value in pairs if type(value) in (int, float)}


class Failing(Monitor):
    """Delegates every event, then fails, except where that ends a run, or at its start the monitor's part."""

    def __init__(self, behind: Monitor) -> None:
        self.behind = behind
        self.declared = behind.declared

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)
        if name in ("on_before_restore", "on_recover", "on_start"):
            return getattr(self.behind, name)

        def fail(*arguments: Any) -> None:
            getattr(self.behind, name)(*arguments)
            raise RuntimeError(f"{name} fails for this test")

        return fail


# --- blocks ---------------------------------------------------------------------------------------


def copies(blocks: Iterable[Block]) -> list[Block]:
    """Detach live blocks from the run by copying."""
    return [attrs.evolve(block, tensor=block.tensor.detach().cpu().clone()) for block in blocks]


def weights(run: Run) -> list[Block]:
    """Return copies of this rank's parameters, after they have all arrived."""
    if hasattr(run.optimizer, "wait"):
        run.optimizer.wait([p.parameter for p in run.placed])
    return copies(Block.of("", dequantize(p.parameter), p.placement) for p in run.placed)


def gradients(run: Run) -> list[Block]:
    """Return copies of the gradients that this rank completes, zeros where no backward reached."""
    pieces = ((piece, run.gradients.gradient_of(piece)) for piece in run.gradients.pieces())
    return copies(block for piece, found in pieces for block in Block.of_piece("", found, piece))


# --- gradients of a check's own making ------------------------------------------------------------


def push(run: Run, step: int, scale: float) -> None:
    """Give every parameter a random gradient that depends only on its name and ``step``.

    It goes through backward, so that the run's gradient sync sees it as it would in training: each
    of the ranks along the summed dimensions contributes an equal part.
    """
    total = torch.zeros((), dtype=torch.float64)
    for placed in run.placed:
        placement = placed.placement
        parts = run.mesh.size(*sorted(placement.summed)) * max(1, len(placement.stages))
        gradient = random_gradient(placed.placement, step) * (scale / parts)
        total = total + (placed.parameter.double() * gradient).sum()
    run.gradients.last_microbatch([placed.parameter for placed in run.placed])
    total.backward()  # type: ignore[no-untyped-call]
    run.gradients.finish()


def random_gradient(placement: Any, step: int) -> torch.Tensor:
    """Draw one rank's block of a gradient, float64."""
    from nanotrain_core.contracts import Initializer

    seed = stream_seed(step, "gradient")
    return initial_block(Initializer("normal", 1.0), seed, placement).double()


#: Up to how many steps weights are kept of each.
FEW_STEPS = 4


@attrs.define(frozen=True, eq=False)
class Drive:
    """The observations of one rank of an optimizer with gradients made by the check."""

    before: list[Block]
    weights: list[Block]
    state: list[Block]
    norms: list[float]
    skipped: list[bool]
    each: list[list[Block]]
    """Weights after every step; none if there are many."""
    meta: dict[str, Any]


def drive(
    case: Case,
    changes: Mapping[str, Any],
    scales: list[float],
    *,
    loss_scale: float = 1.0,
    lr: float | None = None,
    rates: Sequence[float] = (),
    numbers: Sequence[int] = (),
    overflow_from: int | None = None,
    overflow_in: int | None = None,
) -> Drive:
    """Step the case's optimizer once for each of ``scales``, with random gradients of that magnitude.

    Args:
        loss_scale: gradients are multiplied by it and the optimizer is told.
        lr: learning rate set through ``inner.param_groups``.
        rates: factors of the configured learning rate in each step, set likewise.
        numbers: which random gradient each step has; 0, 1, 2, ... unless given.
        overflow_from: the rank whose gradients are infinite.
        overflow_in: in which step they are; in all unless given.
    """
    run = make_run(case, changes)
    groups = run.optimizer.inner.param_groups
    for group in groups if lr is not None else ():
        group["lr"] = lr
    configured = [group["lr"] for group in groups]
    before, stats, each = weights(run), [], []
    for step, scale in enumerate(scales):
        for group, rate in zip(groups, configured, strict=True) if rates else ():
            group["lr"] = rate * rates[step]
        overflow = overflow_from == rank() and overflow_in in (None, step)
        number = numbers[step] if numbers else step
        push(run, number, scale * loss_scale * (float("inf") if overflow else 1.0))
        stats.append(run.optimizer.step(loss_scale=loss_scale))
        run.gradients.zero()
        each.append(weights(run) if len(scales) <= FEW_STEPS else [])
    return Drive(
        before=before,
        weights=weights(run),
        state=copies(run.optimizer.blocks()),
        norms=[s.grad_norm.item() for s in stats],
        skipped=[bool(s.skipped) for s in stats],
        each=each,
        meta=run.optimizer.meta(),
    )
