"""Frozen blocks, which a format may share between checkpoints, come back as they were at each save."""

from __future__ import annotations

import shutil
from pathlib import Path

import attrs
import torch

from nanotrain_core.contracts import TrainState
from nanotrain_core.testing.case import Case
from nanotrain_core.testing.checks import check
from nanotrain_core.testing.checks.checkpoint import path_of_second
from nanotrain_core.testing.compare import assert_bitwise
from nanotrain_core.testing.pool import run_ranks
from nanotrain_core.testing.probe import rank
from nanotrain_core.testing.saving import load, named, numbered, open_state, temporary_folder, wait_for_all

#: What happens to the blocks, or to the first checkpoint, by variant of the check.
HAPPENED = {
    "older_gone": "when the first is deleted (does it depend on the first?)",
    "another_loaded": "after a load between the saves (are frozen blocks of before it kept?)",
}


@check("checkpoint", since="0.3", variants=tuple(HAPPENED))
def frozen_blocks_come_back(case: Case, then: str) -> None:
    """The second of two saves has the frozen blocks as they are then: after the first checkpoint is deleted,
    and after another checkpoint was loaded between the saves."""
    with temporary_folder() as folder, temporary_folder() as other:
        path, *_ = run_ranks(path_of_second, case.world_size, case, other)
        saved = run_ranks(
            save_frozen, case.world_size, case, folder, path if then == "another_loaded" else None
        )
        loaded = run_ranks(load, case.world_size, case, folder, "4")
    for number, (wanted, back) in enumerate(zip(saved, loaded, strict=True)):
        assert back is not None, f"rank {number} found no checkpoint after two saves"
        what = f"blocks of rank {number}, loaded from the second checkpoint {HAPPENED[then]}"
        assert_bitwise(named(back.blocks), wanted, what)


def save_frozen(case: Case, folder: Path, other: Path | None) -> dict[str, torch.Tensor]:
    """Save steps 3 and 4, in which weights are frozen, and return what the latter is to have.

    In between, load the checkpoint ``other``, or, without one, delete step 3 at the end.
    """
    checkpoint, state = open_state(case, folder)
    blocks = [attrs.evolve(block, frozen="/" not in block.name) for block in state.blocks]
    state = numbered(attrs.evolve(state, blocks=blocks), 3)
    checkpoint.save(3, state)
    (report,) = checkpoint.advance(wait=True)
    if other is not None:
        checkpoint.load(str(other), state)
    state = _with_other_state(state, 4)
    checkpoint.save(4, state)
    checkpoint.advance(wait=True)
    wait_for_all()
    if rank() == 0 and other is None:
        shutil.rmtree(report.path) if report.path.is_dir() else report.path.unlink()
    wait_for_all()
    return {name: tensor.clone() for name, tensor in named(state.blocks).items()}


def _with_other_state(state: TrainState, seed: int) -> TrainState:
    """Number what is not frozen anew."""
    changing = [block for block in state.blocks if not block.frozen]
    return attrs.evolve(state, meta=numbered(attrs.evolve(state, blocks=changing), seed).meta)
