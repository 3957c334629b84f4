"""Performance monitors: time and memory of a step, and how a run's wall-clock time was spent (goodput).

The plugin's entry module: every ``nanotrain`` command imports it, so it never imports torch.
"""

import attrs
from attrs.validators import optional

from nanotrain_core.api import Component, Range, Register, hookimpl
from nanotrain_performance import declared

__version__ = "0.1.0"


@attrs.define(frozen=True, kw_only=True)
class ThroughputConfig:
    """``[[monitor]] use = "throughput"``."""

    window: int = attrs.field(default=100, validator=Range(10, 100_000))
    """Number of last steps over which percentiles of the step time are computed."""
    peak_tflops: float | None = attrs.field(default=None, validator=optional(Range(1e-6, 1e9)))
    """Peak of one device, relative to which MFU is computed. None: a known GPU's dense bfloat16 peak."""


@attrs.define(frozen=True, kw_only=True)
class MemoryConfig:
    """``[[monitor]] use = "memory"``."""

    account_every: int = attrs.field(default=100, validator=Range(1))
    """Logged steps after which memory is split anew into weights, gradients, optimizer and activations."""


@attrs.define(frozen=True, kw_only=True)
class PipelineConfig:
    """``[[monitor]] use = "pipeline"``."""


@attrs.define(frozen=True, kw_only=True)
class DeviceConfig:
    """``[[monitor]] use = "device"``."""

    every_seconds: float = attrs.field(default=5.0, validator=Range(0.001, 86_400.0))
    """Seconds between NVML readings, in a separate thread."""


@attrs.define(frozen=True, kw_only=True)
class GoodputConfig:
    """``[[monitor]] use = "goodput"``."""


@hookimpl
def nanotrain_register_monitor(register: Register) -> None:
    """Register ``throughput``, ``memory``, ``pipeline``, ``device`` and ``goodput``."""
    register(
        Component(
            name="throughput",
            config=ThroughputConfig,
            factory=f"{__name__}.throughput:Throughput",
            summary="tokens/s, MFU, and the breakdown of a step's time",
            metrics=declared.THROUGHPUT,
        )
    )
    register(
        Component(
            name="memory",
            config=MemoryConfig,
            factory=f"{__name__}.memory:Memory",
            summary="memory of device and host, by category, and its growth",
            metrics=declared.MEMORY,
        )
    )
    register(
        Component(
            name="pipeline",
            config=PipelineConfig,
            factory=f"{__name__}.pipeline:Pipeline",
            summary="the bubble of each pipeline rank, measured and ideal, and the imbalance of ranks",
            metrics=declared.PIPELINE,
        )
    )
    register(
        Component(
            name="device",
            config=DeviceConfig,
            factory=f"{__name__}.device:Device",
            summary="utilization, memory, power, temperature and clocks of GPUs, from NVML",
            metrics=declared.DEVICE,
        )
    )
    register(
        Component(
            name="goodput",
            config=GoodputConfig,
            factory=f"{__name__}.goodput:Goodput",
            summary="the fraction of time spent training, including restarts, and checkpoints",
            metrics=declared.GOODPUT,
        )
    )
