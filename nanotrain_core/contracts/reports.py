"""The reports that monitors receive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import attrs


@attrs.define(frozen=True)
class StepReport:
    """One logged step. Every value is global, and equal on every rank except times."""

    step: int
    """Steps done, this one included: the first is 1."""
    loss: float
    """The training loss: weighted sum of the terms, each a mean over its global count."""
    losses: Mapping[str, float]
    """Each term's unweighted mean."""
    grad_norm: float
    """Global 2-norm of the gradient, before clipping and without the loss scale."""
    lr: float
    """Learning rate of this step, as scheduled, without an optimizer's factors for some parameters; in a
    script that of the first parameter group."""
    tokens: int
    """Tokens seen since the beginning of the run, including those before a resume."""
    tokens_per_second: float
    """Throughput over all ranks since the last logged step, evaluation, save or rollback, by this rank's
    clock."""
    seconds: float
    """Mean time of a step since then, in seconds, by this rank's clock."""
    loss_scale: float = 1.0
    """Factor of this step's loss before backward; 1 except in float16."""
    skipped: bool = False
    expert_load: float | None = None
    """Tokens of the busiest expert divided by the mean, in the worst layer; None without experts."""
    bubble: float | None = None
    """Fraction of the schedule's time that ranks waited for other stages, mean over ranks; None where no host
    waits: without a pipeline, and on CUDA."""
    phase: int | None = None
    """The recipe's phase in which the step was taken, from 0; None in a recipe without phases."""
    length: int | None = None
    """Sequence length in tokens; None in a script."""
    flops_per_token: float = 0.0
    """Model FLOPs per token, forward and backward: the mean over the tokens of :attr:`tokens_per_second`."""
    sequences_per_second: float = 0.0
    """Over the same steps; 0 in a script, whose batches may have any form."""


@attrs.define(frozen=True)
class EvaluationReport:
    """One pass over the validation batches."""

    step: int
    loss: float
    """Mean next-token loss, in nats. Of a model without that term, the weighted sum of its terms."""
    bits_per_byte: float | None
    """The next-token loss per byte of text, in bits, where tokens are text."""
    tokens: int
    """The predicted tokens over which it is the mean; 0 without a next-token loss."""
    positions: int = 0
    """Tokens of these sequences, predicted or not, without the rows that pad the last batch."""
    seconds: float | None = None
    """How long it took on this rank; None where nobody measured it."""
    losses: Mapping[str, float] = attrs.field(factory=dict)
    """Unweighted mean of each term of the loss that the model returned, by name."""


@attrs.define(frozen=True)
class CheckpointReport:
    """A checkpoint that is complete and in place."""

    step: int
    path: Path
    seconds: float
    """Time from the beginning of the save until it was in place."""
    blocked: float = 0.0
    """Seconds of this time that blocked training."""
    written: Sequence[Path] = ()
    """The files that this rank has written, each file by one rank: ``path`` itself, or files in it. If a
    format reports none on any rank, rank 0 copies all of them elsewhere."""
    trusted: int | None = None
    """The last step that no monitor may still roll back; None if none wants to. Set by the engine."""
    skipped: int = 0
    """Skipped steps right before it, after which retention deletes nothing. Set by the engine."""


@attrs.define(frozen=True)
class FailedSaveReport:
    """A checkpoint that could not be saved: nothing of it remains, and older ones are intact."""

    step: int
    problem: str
    in_a_row: int
    """Consecutive failed saves, this one included: the third ends the run."""


@attrs.define(frozen=True)
class EndReport:
    """How a run ended."""

    step: int
    reason: Literal["done", "stopped", "preempted", "interrupted", "lost", "failed"]
    tokens: int


@attrs.define(frozen=True)
class RollbackReport:
    """The run rolled back to a checkpoint."""

    step: int
    """The step that the run had reached."""
    onset: int
    """The first suspect step."""
    restored: int
    """The step from which it continues."""
    skipped: tuple[int, int]
    """Sequences that will be skipped: the first, and one past the last, counted from the run's start.
    In a script, batches of its loader."""
    count: int
    """Rollbacks of this run so far, including this one and those before a resume."""
    reason: str
