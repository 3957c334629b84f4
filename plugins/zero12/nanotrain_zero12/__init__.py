"""Optimizer-state sharding (ZeRO-1, ZeRO-2): ranks that sum gradients shard AdamW's state and gradients.

The plugin's entry module: every ``nanotrain`` command imports it, so it never imports torch.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import attrs

from nanotrain_core.api import (
    AdamWConfig,
    Component,
    Layout,
    NotCaptured,
    Range,
    Recipe,
    Register,
    check_moments,
    hookimpl,
)

__version__ = "0.1.0"


def _one_or_two(config: Any, field: Any, stage: int) -> None:
    if stage not in (1, 2):
        also = "; [[parallel]] use = 'fsdp2' shards weights too" if stage == 3 else ""
        raise ValueError(f"expected 1 (optimizer state is sharded) or 2 (gradients too), got {stage}{also}")


@attrs.define(frozen=True, kw_only=True)
class Zero12Config(AdamWConfig):
    """``[optimizer] use = "zero12"``."""

    NOT_KEYS: ClassVar[Mapping[str, str]] = {
        "shared_memory": 'it is kernels.shared_memory, of [kernels] use = "cpu", for the whole run',
    }

    stage: int = attrs.field(default=1, validator=_one_or_two)
    """1 shards optimizer state; 2 also gradients, between microbatches."""
    bucket_mb: float = attrs.field(default=25.0, validator=Range(1e-6, 1e6))
    """Size of a bucket of gradients in MiB (2^20 bytes); a transport may require less."""
    overlap: bool = True
    """Reduce-scatter during backward, and all-gather new weights during the next forward if the backend
    can."""
    offload: bool = False
    """Keep master weights and moments in host memory, and update them there. On CPU they always are."""


@attrs.define(frozen=True, kw_only=True)
class ShardConfig:
    """``[[parallel]] use = "zero12"``: the same sharding for any optimizer."""

    stage: int = attrs.field(default=1, validator=_one_or_two)
    """1 shards optimizer state; 2 also gradients, between microbatches."""
    bucket_mb: float = attrs.field(default=25.0, validator=Range(1e-6, 1e6))
    """Size of a bucket of gradients in MiB (2^20 bytes); a transport may require less."""
    overlap: bool = True
    """Reduce-scatter during backward, and all-gather new weights during the next forward if the backend
    can."""


def cuda_graphs(recipe: Recipe, config: Zero12Config | ShardConfig, layout: Layout) -> Iterator[NotCaptured]:
    """Stage 2 reduces gradients in every microbatch, stage 1 only in the last, which is not captured."""
    if config.stage == 2:
        why = "stage 2 reduce-scatters the gradients of every microbatch"
        yield NotCaptured(why, expected="stage 1")


@hookimpl
def nanotrain_register_parallel(register: Register) -> None:
    """Register ``zero12`` for other optimizers."""
    register(
        Component(
            name="zero12",
            config=ShardConfig,
            factory="nanotrain_zero12.parallel_component:Sharded",
            summary="any optimizer, its state (stage 1) and gradients (stage 2) sharded over data ranks",
            provides={"gradient_sync"},
            mesh_dims={"dp"},
            cuda_graphs=cuda_graphs,
        )
    )


@hookimpl
def nanotrain_register_optimizer(register: Register) -> None:
    """Register ``zero12``."""
    register(
        Component(
            name="zero12",
            config=Zero12Config,
            factory="nanotrain_zero12.optimizer:Zero12",
            summary="AdamW with optimizer state (stage 1) and gradients (stage 2) sharded over data ranks",
            provides={"gradient_sync"},
            mesh_dims={"dp"},
            cuda_graphs=cuda_graphs,
            check=check_moments,
        )
    )
