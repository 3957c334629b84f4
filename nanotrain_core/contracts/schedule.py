"""The interface of a pipeline schedule."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from nanotrain_core.pipeline.actions import Action, Costs, Part


class Schedule(Protocol):
    """A pipeline schedule as data. It does not import torch."""

    def parts(self, costs: Costs, pp: int) -> tuple[Part, ...]:
        """Return the stages in model order: consecutive, and covering all layers.

        Each part names the pipeline rank that holds it; a rank with several parts has virtual stages. Recipes
        are checked before the model exists, with equal costs for every layer: whether this raises may depend
        only on the number of layers and ``pp``.

        Raises:
            ValueError: the layers cannot be split into these stages; the text names a number that can.
        """
        ...

    def actions(self, pp: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
        """Return the ordered actions of every pipeline rank for one step.

        Stages are numbered by their position in :meth:`parts`. Each stage has one F and one B for every
        microbatch, on the rank that holds it, F first. A W, if any, follows the B of the same stage and
        microbatch; without one that B also computes the weight gradients. Neighboring stages run their
        microbatches in the same order, forward and backward: NCCL matches messages by order. Send and receive
        are not actions.

        Raises:
            ValueError: the schedule does not exist for this many microbatches; the text names a number for
                which it does.
        """
        ...


@runtime_checkable
class SaysInFlight(Protocol):
    """Optional interface of a schedule: a bound on activations in memory. The harness compares it with the
    actions."""

    def in_flight(self, pp: int, microbatches: int) -> tuple[int, ...]:
        """Return for each rank the peak number of (stage, microbatch) pairs whose activations it holds.

        They are held from F to B, or to W where weight gradients are separate.
        """
        ...
