"""``staged``: a minimal GPipe, for components tested in a pipeline without other plugins.

Every case of the harness knows it: ``overrides={"schedule": {"use": "staged"}}``. It imports no torch.
"""

from __future__ import annotations

from typing import Any

import attrs

from nanotrain_core import hookimpl
from nanotrain_core.component import Component
from nanotrain_core.hookspecs import Register
from nanotrain_core.pipeline.actions import Action, Costs, Part, parts_between


@attrs.define(frozen=True, kw_only=True)
class StagedConfig:
    """It has no keys."""


@hookimpl
def nanotrain_register_schedule(register: Register) -> None:
    """Register ``staged``."""
    register(
        Component(
            name="staged",
            config=StagedConfig,
            factory=f"{__name__}:build",
            summary="one stage a rank, all forward passes before all backward passes, for tests",
            mesh_dims={"pp"},
        )
    )


def build(config: StagedConfig) -> Any:
    """Return the schedule."""
    return Staged()


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
