"""A checkpoint that fits the run but for one tensor is refused: rounded or dropped, it is another run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import attrs
import torch

from nanotrain_core.contracts import Block
from nanotrain_core.errors import CheckpointError
from nanotrain_core.testing.case import Case
from nanotrain_core.testing.checks import check
from nanotrain_core.testing.checks.checkpoint import assert_refused
from nanotrain_core.testing.pool import run_ranks
from nanotrain_core.testing.saving import Refusal, open_state, save_steps, temporary_folder

#: A parameter of every model that the harness saves, on whatever rank.
WEIGHT = "embed.weight"
MOMENT = f"exp_avg/{WEIGHT}"


def _in_another_dtype(block: Block) -> list[Block]:
    other = torch.float32 if block.tensor.dtype == torch.float64 else torch.float64
    return [attrs.evolve(block, tensor=block.tensor.to(other))]


def _left_out(block: Block) -> list[Block]:
    return []


#: Which tensor the run has otherwise than the checkpoint, and what it has.
MISFITS: Mapping[str, tuple[str, Callable[[Block], list[Block]]]] = {
    "weight_in_another_dtype": (WEIGHT, _in_another_dtype),
    "moment_in_another_dtype": (MOMENT, _in_another_dtype),
    "weight_that_is_none_here": (WEIGHT, _left_out),
    "moment_that_is_none_here": (MOMENT, _left_out),
}


@check("checkpoint", since="0.2", variants=tuple(MISFITS))
def what_does_not_fit_is_refused(case: Case, which: str) -> None:
    """A run with one tensor in another dtype, or without one that was saved, is refused on every rank."""
    with temporary_folder() as folder:
        run_ranks(save_steps, case.world_size, case, folder, [1])
        refusals = run_ranks(load_otherwise, case.world_size, case, folder, which)
    assert_refused(refusals, f"a checkpoint with a {which.replace('_', ' ')}", verified=False)


def load_otherwise(case: Case, folder: Path, which: str) -> Refusal:
    """Load step 1 into a run that has one tensor otherwise."""
    checkpoint, state = open_state(case, folder, fill=-1.0)
    name, change = MISFITS[which]
    blocks = [found for each in state.blocks for found in (change(each) if each.name == name else [each])]
    try:
        checkpoint.load("1", attrs.evolve(state, blocks=blocks))
        error = ""
    except CheckpointError as refused:
        error = str(refused)
    return Refusal(error, [], [block.name for block in blocks if (block.tensor != -1.0).any()])
