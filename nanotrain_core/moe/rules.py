"""What the config alone says of a model's experts, for checks before a run. Never imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from nanotrain_core.component import NotCaptured
from nanotrain_core.layout.roles import Role
from nanotrain_core.recipe.divisibility import Divisible

if TYPE_CHECKING:
    from nanotrain_core.layout.layout import Layout
    from nanotrain_core.recipe.tree import Recipe


class ExpertSizes(Protocol):
    """A model's config with experts."""

    @property
    def width(self) -> int:
        """Size of the residual stream."""
        ...

    @property
    def experts(self) -> int:
        """Routed experts per layer."""
        ...

    @property
    def expert_ffn(self) -> int:
        """Width of one expert."""
        ...

    @property
    def moe_layers(self) -> int:
        """Number of layers with experts."""
        ...


def divisible_experts(config: ExpertSizes) -> Iterator[Divisible]:
    """Yield how finely experts can be sharded, for ``ModelConfig.divisibility``."""
    if not config.moe_layers:
        return
    yield Divisible((Role.EXPERTS,), "model.experts", config.experts, "experts")
    width = config.expert_ffn
    yield Divisible((Role.EXPERTS,), "model.expert_ffn", width, "columns of an expert", width=True, row=width)


def experts_captured(recipe: Recipe, config: ExpertSizes, layout: Layout) -> Iterator[NotCaptured]:
    """Yield what is not captured: only bfloat16 has an expert kernel without row counts on the host."""
    precision = recipe.precision.use
    if not config.moe_layers:
        return
    if precision in ("fp64", "fp32", "fp16"):
        yield NotCaptured(
            f"in precision '{precision}' the host reads how many rows each expert got", expected="'bf16'"
        )
    for name, size in (("width", config.width), ("expert_ffn", config.expert_ffn)):
        if size % 8:
            yield NotCaptured(
                f"with {name} = {size} the host reads how many rows each expert got",
                expected=f"a multiple of 8, such as model.{name} = {-(-size // 8) * 8}",
            )
