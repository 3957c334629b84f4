"""The components: an order from :mod:`.schedules`, and which rank holds which stage. Torch-free."""

from __future__ import annotations

from nanotrain_core.api import Action, Costs, Part
from nanotrain_pp_1f1b import InterleavedConfig, PipelineConfig, schedules
from nanotrain_pp_1f1b.split import split


class Pipeline:
    """One stage on each rank. See :class:`~nanotrain_core.contracts.Schedule`."""

    def __init__(self, config: PipelineConfig) -> None:
        self.config = config

    def placement(self, pp: int) -> list[int]:
        """Return the pipeline rank of each stage, in the order of the model."""
        return list(range(pp))

    def order(self, pp: int, rank: int, microbatches: int) -> schedules.Order:
        """Return one rank's list."""
        raise NotImplementedError

    def parts(self, costs: Costs, pp: int) -> tuple[Part, ...]:
        """Return the stages.

        Raises:
            ValueError: there are fewer layers than stages, or the config lists others.
        """
        return split(self.config, costs, self.placement(pp))

    def actions(self, pp: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
        """Return every rank's list; any number of microbatches will do."""
        return tuple(self.order(pp, rank, microbatches) for rank in range(pp))


class GPipe(Pipeline):
    """``gpipe``."""

    def order(self, pp: int, rank: int, microbatches: int) -> schedules.Order:
        """Return one rank's list."""
        return schedules.gpipe(rank, microbatches)


class OneForwardOneBackward(Pipeline):
    """``1f1b``."""

    def order(self, pp: int, rank: int, microbatches: int) -> schedules.Order:
        """Return one rank's list."""
        return schedules.one_forward_one_backward(pp, rank, microbatches)


class ZeroBubbleH1(Pipeline):
    """``zb_h1``."""

    def order(self, pp: int, rank: int, microbatches: int) -> schedules.Order:
        """Return one rank's list."""
        return schedules.zb_h1(pp, rank, microbatches)


class Interleaved(Pipeline):
    """``interleaved_1f1b``: stage s is on rank s mod pp."""

    config: InterleavedConfig

    def placement(self, pp: int) -> list[int]:
        """Return the ranks in turn, v times."""
        return list(range(pp)) * self.config.v

    def order(self, pp: int, rank: int, microbatches: int) -> schedules.Order:
        """Return one rank's list."""
        return schedules.interleaved(pp, rank, microbatches, self.config.v)


class DualPipeV(Pipeline):
    """``dualpipe_v``: stages go down the ranks and up again."""

    def placement(self, pp: int) -> list[int]:
        """Return the ranks from the first to the last and back."""
        return [*range(pp), *reversed(range(pp))]

    def order(self, pp: int, rank: int, microbatches: int) -> schedules.Order:
        """Return one rank's list."""
        return schedules.dualpipe_v(pp, rank, microbatches)
