"""Muon: the momentum of matrices, orthogonalized; AdamW for embeddings, head, routers and vectors.

The plugin's entry module: every ``nanotrain`` command imports it, so it never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import attrs

from nanotrain_core.api import (
    Component,
    OptimizerConfig,
    Range,
    Register,
    Support,
    always_captured,
    hookimpl,
)

__version__ = "0.1.0"


@attrs.define(frozen=True, kw_only=True)
class MuonConfig(OptimizerConfig):
    """``[optimizer] use = "muon"``."""

    momentum: float = attrs.field(default=0.95, validator=Range(0.0, 1.0, below=True))
    """Decay of the sum of a matrix's gradients, which is orthogonalized."""
    nesterov: bool = True
    """Add the step's gradient to the decayed sum once more before it is orthogonalized."""
    weight_decay: float = attrs.field(default=0.1, validator=Range(0.0, 1e3))
    """Decoupled decay of tensors with two or more dimensions, those of AdamW too; norms and biases are not
    decayed."""
    scale: Literal["moonlight", "original"] = "moonlight"
    """Factor of the update of a matrix [m, n]. `moonlight`: 0.2 x sqrt(max(m, n)), for AdamW's learning rates
    and weight decay. `original`: sqrt(max(1, m / n)), for rates of about 0.02."""
    ns_steps: int = attrs.field(default=5, validator=Range(1, 99))
    """Steps of the Newton-Schulz iteration that orthogonalizes."""
    ns_dtype: Literal["auto", "bfloat16", "master"] = "auto"
    """What it computes in, and matrices are sent in. `auto`: bfloat16 on a GPU, the dtype of the master
    weights on a CPU."""
    share_replicas: bool = False
    """Of ranks that hold the same matrix, as with `ddp`, each orthogonalizes some of the matrices and sends
    the results to the others. False: each orthogonalizes all of its own."""
    adamw_lr_ratio: float = attrs.field(default=1.0, validator=Range(0.0, 1e6, above=True))
    """Learning rate of what AdamW updates, as a multiple of `lr`."""
    adamw_betas: tuple[float, float] = attrs.field(default=(0.9, 0.95), validator=Range(0.0, 1.0, below=True))
    """AdamW's decay rates of the first and second moment."""
    adamw_eps: float = attrs.field(default=1e-8, validator=Range(1e-30, 1.0))
    """Added to the root of AdamW's second moment."""
    adamw_names: tuple[str, ...] = ()
    """Matrices that AdamW updates too: names or patterns of parameters, or of modules around them, such as
    `layers.*.attn.kv_b`."""

    ema_decay: float = attrs.field(default=0.0, validator=Range(0.0, 1.0, below=True))
    """Share that a step keeps of an average of the weights (EMA), such as 0.999; 0 keeps no average."""

    @weight_decay.validator
    def _leaves_weights(self, field: Any, value: float) -> None:
        if self.lr * value >= 1:
            raise ValueError(
                f"a step takes lr x weight_decay = {self.lr:g} x {value:g} = {self.lr * value:g} of each "
                "weight away; expected less than 1"
            )

    @adamw_lr_ratio.validator
    def _leaves_those_of_adamw(self, field: Any, value: float) -> None:
        taken = self.lr * value * self.weight_decay
        if taken >= 1:
            raise ValueError(
                f"a step takes lr x adamw_lr_ratio x weight_decay = {self.lr:g} x {value:g} x "
                f"{self.weight_decay:g} = {taken:g} of an embedding away; expected less than 1"
            )


def read_modules(config: MuonConfig) -> Iterator[tuple[str, str]]:
    """Yield what :attr:`MuonConfig.adamw_names` names."""
    return ((f"adamw_names.{number}", pattern) for number, pattern in enumerate(config.adamw_names))


@hookimpl
def nanotrain_register_optimizer(register: Register) -> None:
    """Register ``muon``."""
    register(
        Component(
            name="muon",
            config=MuonConfig,
            factory="nanotrain_muon.optimizer:Muon",
            summary="orthogonalized momentum of matrices, AdamW for embeddings, head, routers and vectors",
            supports={"error_feedback": Support.UNSUPPORTED},
            reads_modules=read_modules,
            cuda_graphs=always_captured,
        )
    )
