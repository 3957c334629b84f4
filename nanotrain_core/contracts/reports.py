"""What monitors are given. Every number is global, and equal on every rank but for times by its clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import attrs


@attrs.define(frozen=True)
class StepReport:
    """One logged step. Every number is global, and equal on every rank but for times."""

    step: int
    """Steps done, this one included: the first is 1."""
    loss: float
    """The training loss: weighted sum of the terms, each a mean over its global count."""
    losses: Mapping[str, float]
    """Each term's unweighted mean."""
    grad_norm: float
    lr: float
    tokens: int
    """Seen since the beginning of the run, resumed parts included."""
    tokens_per_second: float
    """Since the previous report, over all ranks, by this rank's clock."""
    seconds: float
    """Of one step, mean since the previous report, by this rank's clock."""
    loss_scale: float = 1.0
    skipped: bool = False
    expert_load: float | None = None
    """Tokens of the busiest expert over the mean, in the worst layer; None without experts."""
    bubble: float | None = None
    """Share of the schedule's time that ranks waited for other stages, mean over ranks; None where no host
    waits: without a pipeline, and on CUDA."""
    phase: int | None = None
    """Which phase of the recipe the step was taken in, from 0; None of a recipe without phases."""
    length: int | None = None
    """Tokens of each sequence; None of a script."""
    flops_per_token: float = 0.0
    """Of the model, forward and backward, for sequences of that length."""


@attrs.define(frozen=True)
class EvaluationReport:
    """One pass over the validation batches."""

    step: int
    loss: float
    """Mean next-token loss, in nats."""
    bits_per_byte: float | None
    """The same loss per byte of text, in bits, where tokens are text."""
    tokens: int
    """Predicted tokens it is the mean of."""
    positions: int = 0
    """Tokens of these batches, predicted or not."""


@attrs.define(frozen=True)
class CheckpointReport:
    """A checkpoint that is complete and in place."""

    step: int
    path: Path
    seconds: float
    """From the beginning of the save until it was in place."""
    blocked: float = 0.0
    """Seconds of these that training waited."""
    written: Sequence[Path] = ()
    """The files of it that this rank has written, each file by one rank: ``path`` itself, or files in it. A
    format that says so on no rank leaves it to rank 0 to copy all of them elsewhere."""


@attrs.define(frozen=True)
class FailedSaveReport:
    """A checkpoint that could not be saved: nothing of it is left, and no older one is harmed."""

    step: int
    problem: str
    in_a_row: int
    """Saves that have failed since one succeeded, this one included: the third ends the run."""


@attrs.define(frozen=True)
class EndReport:
    """How a run ended."""

    step: int
    reason: Literal["done", "stopped", "preempted", "interrupted", "lost", "failed"]
    tokens: int


@attrs.define(frozen=True)
class RollbackReport:
    """A run went back to a checkpoint."""

    step: int
    """Where it had come to."""
    onset: int
    """The first step that was suspected."""
    restored: int
    """The step it goes on from."""
    skipped: tuple[int, int]
    """Sequences that will not be seen again: first, and one behind the last, counted from the run's start.
    Of a script's loader, batches."""
    count: int
    """Rollbacks of this run so far, this one and those before a resume included."""
    reason: str
