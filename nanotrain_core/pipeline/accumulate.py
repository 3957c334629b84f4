"""The schedule ``accumulate``: gradient accumulation without a pipeline.

It only lists the actions. They are run by the executor, and gradients are accumulated over microbatches by
autograd and the gradient sync (``layout/gradients.py``). Torch-free.
"""

from __future__ import annotations

from nanotrain_core.builtin.configs import AccumulateConfig
from nanotrain_core.pipeline.actions import Action, Costs, Part


class Accumulate:
    """Each microbatch goes forward, then backward, through the whole model."""

    def __init__(self, config: AccumulateConfig) -> None:
        del config  # it has no keys

    def parts(self, costs: Costs, pp: int) -> tuple[Part, ...]:
        """Return one part, the whole model.

        Raises:
            ValueError: the layout has a pipeline.
        """
        if pp != 1:
            raise ValueError(f"schedule 'accumulate' has one stage, but pp = {pp}: use a pipeline schedule")
        return (Part.whole(len(costs.layers)),)

    def actions(self, pp: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
        """Return F and B of every microbatch in turn."""
        return (tuple(Action(kind, 0, m) for m in range(microbatches) for kind in ("F", "B")),)

    def in_flight(self, pp: int, microbatches: int) -> tuple[int, ...]:
        """Return one: each backward pass follows its forward pass."""
        return (1,)
