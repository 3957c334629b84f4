"""What a pipeline schedule must offer."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from nanotrain_core.pipeline.actions import Action, Costs, Part


class Schedule(Protocol):
    """A pipeline schedule as data. Torch-free."""

    def parts(self, costs: Costs, pp: int) -> tuple[Part, ...]:
        """Return the stages in the order of the model: consecutive, and with all of its layers.

        Each names the pipeline rank that holds it; a rank with several holds virtual stages. Before a run
        only the number of layers is known, and ``costs`` are alike: whether there are stages must depend
        on nothing else.

        Raises:
            ValueError: so many layers cannot be cut like that; the text says what can.
        """
        ...

    def actions(self, pp: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
        """Return the ordered actions of every pipeline rank for one step.

        Raises:
            ValueError: the schedule does not exist for so many microbatches.
        """
        ...


@runtime_checkable
class SaysInFlight(Protocol):
    """What a schedule may offer beside: a bound on activations in memory, which the harness tests."""

    def in_flight(self, pp: int, microbatches: int) -> tuple[int, ...]:
        """Return for each rank the most (stage, microbatch) pairs whose activations it holds at once.

        They are held from F to B, or to W where the weight gradients have one.
        """
        ...
