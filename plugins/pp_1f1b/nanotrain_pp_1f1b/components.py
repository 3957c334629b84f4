"""The schedule components: an order from :mod:`.schedules`, and the rank of each stage. Torch-free."""

from __future__ import annotations

import math

from nanotrain_core.api import Action, Costs, Part
from nanotrain_pp_1f1b import InterleavedConfig, PipelineConfig, schedules
from nanotrain_pp_1f1b.split import split


class Pipeline:
    """One stage on each rank. See :class:`~nanotrain_core.contracts.Schedule`."""

    def __init__(self, config: PipelineConfig) -> None:
        self.config = config

    def placement(self, pp: int) -> list[int]:
        """Return the pipeline rank of each stage, in model order."""
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
        """Return every rank's list; any number of microbatches is supported."""
        return tuple(self.order(pp, rank, microbatches) for rank in range(pp))

    def held(self, pp: int, rank: int) -> float:
        """Return a rank's peak number of (stage, microbatch) pairs, for any number of microbatches."""
        return math.inf

    def in_flight(self, pp: int, microbatches: int) -> tuple[int, ...]:
        """Return each rank's peak: at most all microbatches in all of its stages."""
        stages = len(self.placement(pp)) // pp
        return tuple(int(min(self.held(pp, rank), stages * microbatches)) for rank in range(pp))


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

    def held(self, pp: int, rank: int) -> float:
        """Return one for this rank, and one for each later rank."""
        return pp - rank


class ZeroBubbleH1(Pipeline):
    """``zb_h1``."""

    def order(self, pp: int, rank: int, microbatches: int) -> schedules.Order:
        """Return one rank's list."""
        return schedules.zb_h1(pp, rank, microbatches)

    def held(self, pp: int, rank: int) -> float:
        """Return as many as the first rank of 1F1B holds."""
        return pp


class Interleaved(Pipeline):
    """``interleaved_1f1b``: stage s is on rank s mod pp."""

    config: InterleavedConfig

    def placement(self, pp: int) -> list[int]:
        """Return the ranks in turn, v times."""
        return list(range(pp)) * self.config.v

    def order(self, pp: int, rank: int, microbatches: int) -> schedules.Order:
        """Return one rank's list."""
        return schedules.interleaved(pp, rank, microbatches, self.config.v)

    def in_flight(self, pp: int, microbatches: int) -> tuple[int, ...]:
        """Return the warm-up of each rank plus one: see :func:`.schedules.interleaved`."""
        group = -(-microbatches // max(1, microbatches // pp))
        warm_up = [(self.config.v - 1) * group + 2 * (pp - 1 - rank) for rank in range(pp)]
        return tuple(min(first + 1, self.config.v * microbatches) for first in warm_up)


class DualPipeV(Pipeline):
    """``dualpipe_v``: stages go down the ranks and up again."""

    def placement(self, pp: int) -> list[int]:
        """Return the ranks from the first to the last and back."""
        return [*range(pp), *reversed(range(pp))]

    def order(self, pp: int, rank: int, microbatches: int) -> schedules.Order:
        """Return one rank's list."""
        return schedules.dualpipe_v(pp, rank, microbatches)

    def held(self, pp: int, rank: int) -> float:
        """Return two for each rank, plus the one in progress."""
        return 2 * pp + 1
