"""LoRA: trains low-rank adapters beside the linear layers of a frozen model.

The plugin's entry module: every ``nanotrain`` command imports it, so it never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import sqrt
from typing import ClassVar

import attrs

from nanotrain_core.api import SAME_ON_RESUME, Component, Range, Register, always_captured, hookimpl

__version__ = "0.1.0"


@attrs.define(frozen=True, kw_only=True)
class LoRAConfig:
    """``[[parallel]] use = "lora"``, after wrappers that split linear layers, such as ``tp``."""

    NOT_KEYS: ClassVar[Mapping[str, str]] = {
        "dropout": "masks would depend on the layout, and adapters have none",
        "lora_dropout": "masks would depend on the layout, and adapters have none",
        "r": "it is rank",
        "lora_alpha": "it is alpha",
        "target_modules": "it is targets, with this model's names, such as q, not q_proj; left out: all",
        "use_rslora": "it is rslora",
        "quantize_base": 'it is [precision] use = "qlora", of nanotrain-fp4-master',
        "bias": "all parameters of the model are frozen, biases too",
    }

    rank: int = attrs.field(default=8, validator=Range(1))
    """Rows of A, and columns of B."""
    alpha: float = attrs.field(default=16.0, validator=Range(0.0, 1e6), metadata={SAME_ON_RESUME: True})
    """What an adapter computes is multiplied by alpha / rank."""
    rslora: bool = attrs.field(default=False, metadata={SAME_ON_RESUME: True})
    """Multiply by alpha / sqrt(rank) instead, so that a higher rank learns as fast."""
    targets: tuple[str, ...] = ()
    """Names or patterns of modules whose linear layers get adapters: `q` is every module of that name, `ffn`
    every linear layer in modules of that name, `layers.*.attn` a whole name. None named: all linear layers of
    the layers, but those of routers and routed experts."""

    @property
    def scale(self) -> float:
        """The factor of what an adapter computes."""
        return self.alpha / (sqrt(self.rank) if self.rslora else self.rank)

    def patterns(self) -> tuple[str, ...]:
        """Return patterns of whole names."""
        return tuple(each if "." in each else f"*.{each}" for each in self.targets)


def read_modules(config: LoRAConfig) -> Iterator[tuple[str, str]]:
    """Yield what :attr:`LoRAConfig.targets` names."""
    for number, pattern in enumerate(config.patterns()):
        yield f"targets.{number}", pattern


@hookimpl
def nanotrain_register_parallel(register: Register) -> None:
    """Register ``lora``."""
    register(
        Component(
            name="lora",
            config=LoRAConfig,
            factory="nanotrain_lora.adapters:LoRA",
            summary="trains low-rank adapters beside frozen linear layers",
            provides={"frozen_weights"},
            example={"rank": 4},
            added="nanotrain_lora.weights:weights",
            reads_modules=read_modules,
            check_model="nanotrain_lora.checks:check_model",
            cuda_graphs=always_captured,
        )
    )
