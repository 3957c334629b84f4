"""Checkpoints to which every rank writes a shard and which any layout reads: safetensors, JSON and SHA-256.

The plugin's entry module: every ``nanotrain`` command imports it, so it never imports torch.
"""

from typing import Literal

import attrs

from nanotrain_core.api import Component, Range, Register, hookimpl

__version__ = "0.1.0"


@attrs.define(frozen=True, kw_only=True)
class ShardedConfig:
    """``[checkpoint] use = "sharded_v2"``."""

    every: int = attrs.field(default=0, validator=Range(0))
    """Steps between checkpoints; 0 leaves it to `every_minutes` and the end of the run."""
    every_minutes: float = attrs.field(default=0.0, validator=Range(0.0, 1e6))
    """Minutes between checkpoints, by rank 0's clock; 0 leaves it to `every`."""
    keep: int = attrs.field(default=2, validator=Range(1))
    """Number of newest checkpoints to keep. In addition, the newest verified one, the newest of those before
    the last finite validation loss, and those the run was restored from are kept."""
    asynchronous: bool = True
    """Write files while training continues, at the cost of a copy of this rank's shard in host memory."""
    link_frozen: bool = True
    """Share the files of frozen weights, such as those of LoRA, between checkpoints by hard links, instead
    of writing them at each save."""
    verify: Literal["full", "size", "none"] = "full"
    """Before a load: compare every file's SHA-256, only sizes, or nothing."""


@hookimpl
def nanotrain_register_checkpoint(register: Register) -> None:
    """Register ``sharded_v2``."""
    register(
        Component(
            name="sharded_v2",
            config=ShardedConfig,
            factory="nanotrain_sharded_ckpt_v2.checkpoint:ShardedCheckpoint",
            summary="sharded, hashed, written asynchronously, readable on any layout",
            weights="nanotrain_sharded_ckpt_v2.weights:open_weights",
            listing="nanotrain_sharded_ckpt_v2.listing:list_checkpoints",
        )
    )
