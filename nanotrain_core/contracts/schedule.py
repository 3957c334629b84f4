"""The interface of a pipeline schedule."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from nanotrain_core.pipeline.actions import Action, Costs, Part


class Schedule(Protocol):
    """A pipeline schedule as data. It does not import torch."""

    def parts(self, costs: Costs, pp: int) -> tuple[Part, ...]:
        """Return the stages in model order: consecutive, and covering all layers.

        Each names the pipeline rank that holds it; a rank with several holds virtual stages. Before a run
        only the number of layers is known, and ``costs`` are equal: whether there are stages must depend
        on nothing else.

        Raises:
            ValueError: this many layers cannot be split like that; the text says what can.
        """
        ...

    def actions(self, pp: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
        """Return the ordered actions of every pipeline rank for one step.

        Raises:
            ValueError: the schedule does not exist for this many microbatches.
        """
        ...


@runtime_checkable
class SaysInFlight(Protocol):
    """Optional interface of a schedule: a bound on activations in memory, which the harness tests."""

    def in_flight(self, pp: int, microbatches: int) -> tuple[int, ...]:
        """Return for each rank the peak number of (stage, microbatch) pairs whose activations it holds.

        They are held from F to B, or to W where weight gradients are separate.
        """
        ...
