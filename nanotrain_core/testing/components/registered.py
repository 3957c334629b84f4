"""Registers the harness's own components, which every case knows, to test others without plugins.

It imports no torch. ``overrides={"parallel": [{"use": "summed"}]}`` has one of them.
"""

from __future__ import annotations

from typing import Any

import attrs

from nanotrain_core import hookimpl
from nanotrain_core.component import Component
from nanotrain_core.hookspecs import Register
from nanotrain_core.testing.components.gpipe import Staged
from nanotrain_core.testing.components.moe import RoutedConfig


@attrs.define(frozen=True, kw_only=True)
class NoKeys:
    """It has no keys."""


@attrs.define(frozen=True, kw_only=True)
class CoarseConfig:
    """``[precision] use = "coarse"``."""

    step: float = 0.1
    """Weights are multiples of this. 0: masters are exact, but loaded and stored as others are."""


@attrs.define(frozen=True, kw_only=True)
class SlicedConfig:
    """How layers are split."""

    sequence_parallel: bool = False
    """Whether ranks also split the tokens between the layers that they split, so that the gradients of norms,
    biases, embedding and head are partial."""


@hookimpl
def nanotrain_register_model(register: Register) -> None:
    """Register ``routed``: a small mixture of experts with every role."""
    summary = "a small mixture of experts with every role once, for tests"
    register(_component("routed", summary, RoutedConfig))


@hookimpl
def nanotrain_register_parallel(register: Register) -> None:
    """Register two gradient syncs, of which one shards optimizer state, and wrappers that rely on roles."""
    sync: dict[str, Any] = {"provides": {"gradient_sync"}, "mesh_dims": {"dp"}}
    summed = "one all-reduce per parameter after backward, for tests"
    ranged = "an all-reduce per parameter, of which each rank updates a range, for tests"
    sliced = "slices of linear layers, as their roles say, for tests"
    spread = "experts on several ranks, each of which computes with the tokens of all, for tests"
    register(_component("summed", summed, **sync))
    register(_component("ranged", ranged, **sync))
    register(_component("sliced", sliced, SlicedConfig, mesh_dims={"tp"}))
    register(_component("spread", spread, mesh_dims={"ep"}))


@hookimpl
def nanotrain_register_precision(register: Register) -> None:
    """Register a precision that needs error feedback, and one of two dtypes.

    Norms in a wider dtype than matrices are usual; who keeps all gradients in one buffer must still be right.
    """
    coarse = "float64 weights that are multiples of a step, for tests"
    register(_component("coarse", coarse, CoarseConfig))
    register(_component("wide_norms", "float32 matrices and float64 vectors, for tests"))


@hookimpl
def nanotrain_register_schedule(register: Register) -> None:
    """Register ``staged``: a minimal GPipe."""
    summary = "one stage a rank, all forward passes before all backward passes, for tests"
    register(_component("staged", summary, mesh_dims={"pp"}))


def _component(name: str, summary: str, config: type = NoKeys, **more: Any) -> Component:
    return Component(name=name, config=config, factory=f"{__name__}:{name}", summary=summary, **more)


# --- factories ----------------------------------------------------------------------------------------


def routed(config: RoutedConfig) -> Any:
    from nanotrain_core.testing.components.moe_model import Routed

    return Routed(config)


def summed(config: NoKeys) -> Any:
    from nanotrain_core.testing.components.all_reduce_gradients import SummedGradients

    return SummedGradients()


def ranged(config: NoKeys) -> Any:
    from nanotrain_core.testing.components.zero1_gradients import RangedGradients

    return RangedGradients()


def sliced(config: SlicedConfig) -> Any:
    from nanotrain_core.testing.components.tensor_parallel_layers import Sliced

    return Sliced(config.sequence_parallel)


def spread(config: NoKeys) -> Any:
    from nanotrain_core.testing.components.expert_parallel_layers import Spread

    return Spread()


def coarse(config: CoarseConfig) -> Any:
    from nanotrain_core.testing.components.low_precision_master_weights import Coarse

    return Coarse(config.step)


def wide_norms(config: NoKeys) -> Any:
    from nanotrain_core.testing.components.float64_norms_precision import WideNorms

    return WideNorms()


def staged(config: NoKeys) -> Any:
    return Staged()
