"""Pipeline schedules as data: GPipe, 1F1B, interleaved 1F1B, ZB-H1 and DualPipeV.

The plugin's entry module: every ``nanotrain`` command imports it, so it never imports torch.
"""

from typing import Any

import attrs
from attrs.validators import and_, optional

from nanotrain_core.api import MOST_LAYERS, Component, Range, Register, hookimpl, not_empty

__version__ = "0.1.0"

_layers: Any = optional(and_(not_empty, Range(0, MOST_LAYERS)))


@attrs.define(frozen=True, kw_only=True)
class PipelineConfig:
    """The common keys of every pipeline schedule's ``[schedule]``: how layers are split into stages."""

    layers: tuple[int, ...] | None = attrs.field(default=None, validator=_layers)
    """Layers of each stage: 0 leaves only the embedding or head to a stage. Unset: balanced."""
    embedding_cost: float | None = attrs.field(default=None, validator=Range(0.0, 1e6))
    """Time of the embedding, in (mean) layers, for balancing stages. Unset: by the model's FLOPs."""
    head_cost: float | None = attrs.field(default=None, validator=Range(0.0, 1e6))
    """Time of the head and modules after it, in (mean) layers. Unset: by the model's FLOPs."""


@attrs.define(frozen=True, kw_only=True)
class InterleavedConfig(PipelineConfig):
    """``[schedule] use = "interleaved_1f1b"``."""

    v: int = attrs.field(default=2, validator=Range(1, MOST_LAYERS))
    """Virtual stages on each rank: v times less idle time for v times as many messages."""


@hookimpl
def nanotrain_register_schedule(register: Register) -> None:
    """Register ``gpipe``, ``1f1b``, ``interleaved_1f1b``, ``zb_h1`` and ``dualpipe_v``."""
    summaries = {
        "gpipe": ("GPipe", "all forward passes, then all backward passes"),
        "1f1b": (
            "OneForwardOneBackward",
            "one forward, one backward: no more than pp microbatches in flight",
        ),
        "interleaved_1f1b": ("Interleaved", "1F1B with v stages on each rank: 1/v of the idle time"),
        "zb_h1": (
            "ZeroBubbleH1",
            "1F1B whose weight gradients fill a part of the idle time, in the same memory",
        ),
        "dualpipe_v": ("DualPipeV", "stages along a V, two on each rank, forward and backward in turn"),
    }
    for name, (factory, summary) in summaries.items():
        register(
            Component(
                name=name,
                config=InterleavedConfig if name == "interleaved_1f1b" else PipelineConfig,
                factory=f"nanotrain_pp_1f1b.components:{factory}",
                summary=summary,
                mesh_dims={"pp"},
            )
        )
