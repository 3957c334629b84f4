"""When a run has diverged and is given up: skipped steps in a row, weights that are not finite at a save.

No step heals such weights, and retention would delete the good ones for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nanotrain_core.checkpoint.saver import CheckpointSaver
from nanotrain_core.contracts import Block
from nanotrain_core.errors import Diverged
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.run.told import Told

#: Steps in a row with a gradient that is not finite before a run is given up. A dynamic loss scale
#: needs up to 24 to find its floor.
MOST_SKIPPED = 30
#: As many at the end of a run, and it is not done: a dynamic loss scale skips one or two.
MOST_AT_THE_END = 2


class SkippedSteps:
    """Counts skipped steps in a row."""

    def __init__(self, saves: CheckpointSaver) -> None:
        self.in_a_row, self.saves = 0, saves

    def learn(self, told: Told) -> None:
        """Count a step.

        Raises:
            Diverged: it was one too many.
        """
        self.in_a_row = self.in_a_row + 1 if told.skipped else 0
        if self.in_a_row == MOST_SKIPPED:
            self.saves.advance(wait=True)  # on all ranks alike: a good one may be on its way
            raise Diverged(
                f"step {told.step}: the gradient norm was {told.grad_norm} for {MOST_SKIPPED} "
                "steps in a row, which were skipped: the weights are those from before"
            )

    def expect_few(self, steps: int, *, stopped: bool) -> None:
        """Check the end of a run of so many steps; one that was ``stopped`` will go on.

        Raises:
            Diverged: it ends in skipped ones.
        """
        if self.in_a_row > MOST_AT_THE_END and not stopped:
            raise Diverged(
                f"the last {self.in_a_row} of {steps} steps were skipped, since their gradient norm was not "
                "finite: the run is at its end and not done"
            )


def first_not_finite(blocks: Sequence[Block]) -> str:
    """Return the name of the first block with a NaN or an infinity; empty if there is none."""
    floats = [block for block in blocks if block.tensor.is_floating_point() and block.tensor.numel()]
    if not floats:
        return ""
    # One kernel for many tensors, and one wait for the device: the largest magnitude tells of both.
    largest = torch._foreach_norm([block.tensor for block in floats], ord=torch.inf)
    finite = torch.stack([each.double() for each in largest]).isfinite().tolist()
    return next((block.name for block, good in zip(floats, finite, strict=True) if not good), "")


def expect_finite(weights: Sequence[Block], mesh: Mesh, step: int) -> None:
    """Collective. Check this rank's weights before a save.

    Raises:
        Diverged: a weight of some rank is not finite: on all ranks, with the first one's name and rank.
    """
    found = mesh.gather(first_not_finite(weights))
    for rank, name in enumerate(found):
        if name:
            raise Diverged(
                f"after step {step} {name} is not finite on rank {rank}, and no later step would mend it: "
                "nothing was saved; go on from an older checkpoint with --resume STEP, with a lower learning "
                "rate or the monitor guard, which rolls back by itself"
            )
