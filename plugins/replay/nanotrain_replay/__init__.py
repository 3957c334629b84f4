"""Replays a microbatch on every data-parallel replica and compares the bits: does every rank compute right?

The plugin's entry module: every ``nanotrain`` command imports it, so it never imports torch.

Source of the idea: the rerun state machine of Megatron-LM, which computes a suspicious step again on the same
and on another GPU.
"""

import attrs

from nanotrain_core.api import Component, Metric, Range, Register, hookimpl

__version__ = "0.1.0"


@attrs.define(frozen=True, kw_only=True)
class ReplayConfig:
    """``[[monitor]] use = "replay"``."""

    every: int = attrs.field(default=100, validator=Range(1))
    """Steps between replays. Each costs the forward and backward pass of one microbatch, and the memory of
    its gradients."""


METRICS = (
    Metric(
        name="replay/seconds",
        unit="s",
        group="reliability",
        reduce="max",
        summary="time to replay a microbatch and compare, slowest rank",
    ),
)


@hookimpl
def nanotrain_register_monitor(register: Register) -> None:
    """Register ``replay``."""
    register(
        Component(
            name="replay",
            config=ReplayConfig,
            factory="nanotrain_replay.monitor:Replay",
            summary="replays a microbatch on every replica, and compares what they compute, bit for bit",
            metrics=METRICS,
        )
    )
