"""``staged``: a minimal GPipe, for components tested in a pipeline without other plugins. Torch-free."""

from __future__ import annotations

from nanotrain_core.pipeline.actions import Action, Costs, Part, parts_between


class Staged:
    """See :class:`~nanotrain_core.contracts.Schedule`. Source: Huang et al., arXiv 1811.06965."""

    def parts(self, costs: Costs, pp: int) -> tuple[Part, ...]:
        """Return one stage for each rank, with layer counts that differ by at most one.

        Raises:
            ValueError: there are fewer layers than ranks.
        """
        layers = len(costs.layers)
        if layers < pp:
            raise ValueError(f"schedule 'staged' has {pp} stages, but the model has {layers} layers")
        return parts_between([layers * stage // pp for stage in range(pp + 1)], range(pp))

    def actions(self, pp: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
        """Return F of every microbatch, then B of every microbatch, on each rank."""
        both: tuple[tuple[Action, ...], ...] = tuple(
            (
                *(Action("F", rank, m) for m in range(microbatches)),
                *(Action("B", rank, m) for m in range(microbatches)),
            )
            for rank in range(pp)
        )
        return both

    def in_flight(self, pp: int, microbatches: int) -> tuple[int, ...]:
        """Return the peak number of forward passes each rank holds: all of them."""
        return (microbatches,) * pp
