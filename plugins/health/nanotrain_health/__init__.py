"""Training health: monitors that publish diagnostic metrics and report problems in plain sentences.

The plugin's entry module: every ``nanotrain`` command imports it, so it never imports torch.
"""

from typing import Literal

import attrs

from nanotrain_core.api import PATIENCE, Component, Metric, Range, Register, hookimpl
from nanotrain_health.catalogue.activations import ATTENTION, RESIDUAL
from nanotrain_health.catalogue.common import TENSORS_EVERY
from nanotrain_health.catalogue.experts import EXPERTS
from nanotrain_health.catalogue.loss_and_data import DATA, LOSS
from nanotrain_health.catalogue.probes import PROBES
from nanotrain_health.catalogue.training import GRADIENTS, OPTIMIZER, UPDATES, WEIGHTS

__version__ = "0.1.0"

SAID = Metric(
    name="health",
    unit="",
    group="health",
    kind="text",
    level="minimal",
    summary="problems that begin or end, one sentence each; reported with the next logged step",
)


@attrs.define(frozen=True, kw_only=True)
class HealthConfig:
    """``[[monitor]] use = "health"``."""

    level: Literal["minimal", "standard", "debug"] = "standard"
    """`minimal`: loss, data and clipping, available on the host. `standard`: norms by layer, and the first,
    middle and last layer in detail. `debug`: all layers, every parameter, histograms."""
    every: int = attrs.field(default=TENSORS_EVERY, validator=Range(1))
    """Steps between readings of tensors. They are read only in logged steps: in each of the first 20 steps,
    and in each while a trouble that they show, or its end, is not certain enough to be reported. Loss, data
    and clipping are reported in every logged step."""
    queries: int = attrs.field(default=4, validator=Range(0))
    """Queries of each sequence whose attention is computed; 0: none."""
    ema: float = attrs.field(default=0.98, validator=Range(0.0, 1.0, above=True, below=True))
    """Decay per step of exponential moving averages, such as that of the loss."""
    patience: int = attrs.field(default=PATIENCE, validator=Range(1))
    """Consecutive logged steps outside the limits before a problem is reported (at most 2 if bad, 1 if NaN or
    infinite), and inside before it is reported as over."""


@attrs.define(frozen=True, kw_only=True)
class MoEConfig:
    """``[[monitor]] use = "moe"``: how tokens are spread over experts."""

    loads_every: int = attrs.field(default=50, validator=Range(0))
    """Most steps between histograms of every layer's tokens by expert, in logged steps; 0: none. They begin
    with the first step, at intervals that double, and the last step has them."""


@attrs.define(frozen=True, kw_only=True)
class ProbesConfig:
    """``[[monitor]] use = "probes"``: one fixed batch, read again and again."""

    every: int = attrs.field(default=50, validator=Range(1))
    """Steps between probes, each two forward passes."""
    sequences: int = attrs.field(default=2, validator=Range(2))
    """Sequences in the batch: the first ones of the validation data."""
    length: int = attrs.field(default=256, validator=Range(2))
    """Tokens read of each, from its first on, at most batch.length. Every rank holds the logits of two such
    batches at once: 2 x 256 with a vocabulary of 129,280 are 265 MB in bfloat16."""
    top: int = attrs.field(default=10, validator=Range(1))
    """k of the top-k probability mass."""


@hookimpl
def nanotrain_register_monitor(register: Register) -> None:
    """Register ``health``, ``moe`` and ``probes``."""
    register(
        Component(
            name="health",
            config=HealthConfig,
            factory=f"{__name__}.monitor:Health",
            summary="essential metrics of a run, and its problems in plain sentences",
            metrics=(*LOSS, *DATA, *GRADIENTS, *UPDATES, *WEIGHTS, *OPTIMIZER, *ATTENTION, *RESIDUAL, SAID),
        )
    )
    register(
        Component(
            name="moe",
            config=MoEConfig,
            factory=f"{__name__}.moe:MoE",
            summary="distribution of tokens over experts, by layer",
            metrics=EXPERTS,
        )
    )
    register(
        Component(
            name="probes",
            config=ProbesConfig,
            factory=f"{__name__}.probes:Probes",
            summary="loss, entropy and drift on one fixed batch, and leaks of future tokens",
            metrics=PROBES,
        )
    )
