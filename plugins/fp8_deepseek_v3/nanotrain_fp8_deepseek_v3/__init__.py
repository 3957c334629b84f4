"""Training in eight bits as DeepSeek-V3, in MXFP8 and in NVFP4: products of linear layers, finely scaled.

The plugin's entry module: every ``nanotrain`` command imports it, so it never imports torch.
"""

from collections.abc import Iterator
from typing import Literal

import attrs

from nanotrain_core.api import (
    Component,
    Layout,
    Metric,
    Range,
    Recipe,
    Register,
    Role,
    Rule,
    StaysEager,
    Support,
    divisibility_of,
    hookimpl,
)
from nanotrain_fp8_deepseek_v3.configs import (
    FP8DeepSeekV3Config,
    FP8HybridConfig,
    ModuleFormats,
    MXFP8Config,
    NVFP4Config,
)

__version__ = "0.1.0"

Reduce = Literal["sum", "mean", "max"]
Cost = Literal["host", "layers"]


@attrs.define(frozen=True, kw_only=True)
class FP8MonitorConfig:
    """``[[monitor]] use = "fp8"``."""

    every: int = attrs.field(default=50, validator=Range(1))
    """Watch the first step, and then one step in this many."""


def _metric(
    figure: str,
    summary: str,
    *,
    unit: str = "1",
    reduce: Reduce = "mean",
    cost: Cost = "layers",
    rule: Rule | None = None,
) -> Metric:
    return Metric(
        name=f"fp8/{figure}/{{module}}/{{operand}}",
        unit=unit,
        group="precision",
        level="debug",
        cost=cost,
        reduce=reduce,
        summary=summary,
        rule=rule,
    )


OVERFLOW = Rule(
    bad_above=0,
    high="{percent} of an operand in {where} is no finite number in FP8: an element is infinite or NaN; "
    "lower lr, or keep this module in bf16",
)
METRICS = (
    _metric(
        "elements",
        "elements of an operand that were counted, on all ranks: of replicated weights each copy",
        unit="elements",
        reduce="sum",
        cost="host",
    ),
    _metric("amax", "largest magnitude of an operand", reduce="max"),
    _metric("underflow", "share of an operand's elements that are not zero, and are once rounded"),
    _metric("overflow", "share that is no finite number once rounded", rule=OVERFLOW),
    _metric("at_largest", "share whose code is the format's largest number"),
)


def patterns(config: ModuleFormats) -> dict[str, tuple[str, ...]]:
    """Return the patterns that must match something, by key: those that the user wrote, not the defaults."""
    default = type(config)()
    keys = [key for key in (config.LOW, "bf16", "fp32", "power_of_two") if hasattr(config, key)]
    return {key: getattr(config, key) for key in keys if getattr(config, key) != getattr(default, key)}


def read_modules(config: ModuleFormats) -> Iterator[tuple[str, str]]:
    """Yield each of these patterns."""
    for key, found in patterns(config).items():
        yield from ((f"{key}.{number}", pattern) for number, pattern in enumerate(found))


def stays_eager(recipe: Recipe, config: ModuleFormats, layout: Layout) -> Iterator[StaysEager]:
    """Yield products that no graph can contain: all of Transformer Engine's, those of experts by ``torch``.

    Except for ``fp8_deepseek_v3``, ``auto`` is ``torch`` on a GPU.
    """
    by_torch = {"torch"} if isinstance(config, FP8DeepSeekV3Config) else {"torch", "auto"}
    if config.backend == "te":
        yield StaysEager(Role.BLOCK, "Transformer Engine's tensors are no operands of a graph")
    elif config.backend in by_torch and _may_have_experts(recipe):
        yield StaysEager(
            Role.EXPERTS, "'torch' multiplies expert by expert, and the host must learn their rows"
        )


def refuses_gpu(
    recipe: Recipe, config: ModuleFormats, layout: Layout, capability: tuple[int, int]
) -> Iterator[str]:
    """Yield what tensor cores lack: all backends but the emulation need them."""
    lacks = config.UNITS.lacks(capability)
    if lacks and config.backend != "emulated":
        yield lacks


def _may_have_experts(recipe: Recipe) -> bool:
    divisibility = divisibility_of(recipe.model.config)
    return divisibility is None or any(Role.EXPERTS in extent.roles for extent in divisibility)


@hookimpl
def nanotrain_register_precision(register: Register) -> None:
    """Register ``fp8_deepseek_v3``, ``fp8_hybrid``, ``mxfp8`` and ``nvfp4``."""
    register(
        Component(
            name="fp8_deepseek_v3",
            config=FP8DeepSeekV3Config,
            factory=f"{__name__}.precision:FP8DeepSeekV3",
            summary="bf16 with all GEMMs of linear layers in E4M3, scaled in tiles, as DeepSeek-V3",
            provides={"fp8_products"},
            stays_eager=stays_eager,
            reads_modules=read_modules,
            check_model=f"{__name__}.checks:check_model",
            refuses_gpu=refuses_gpu,
        )
    )
    register(
        Component(
            name="fp8_hybrid",
            config=FP8HybridConfig,
            factory=f"{__name__}.precision:FP8Hybrid",
            summary="bf16 with GEMMs in E4M3 and gradients in E5M2, one scale per tensor",
            provides={"fp8_products"},
            stays_eager=stays_eager,
            reads_modules=read_modules,
            check_model=f"{__name__}.checks:check_model",
            refuses_gpu=refuses_gpu,
        )
    )
    register(
        Component(
            name="mxfp8",
            config=MXFP8Config,
            factory=f"{__name__}.precision:MXFP8",
            summary="bf16 with all GEMMs of linear layers in E4M3, in blocks of 32 with power-of-two scales",
            provides={"fp8_products"},
            stays_eager=stays_eager,
            reads_modules=read_modules,
            check_model=f"{__name__}.checks:check_model",
            refuses_gpu=refuses_gpu,
        )
    )
    register(
        Component(
            name="nvfp4",
            config=NVFP4Config,
            factory=f"{__name__}.precision:NVFP4",
            summary="bf16 with all GEMMs of linear layers in four bits, as Blackwell multiplies them",
            provides={"fp8_products"},
            # Losses of products in four bits are a few percent from float32's.
            supports={"follows_float32": Support.PARTIAL},
            stays_eager=stays_eager,
            reads_modules=read_modules,
            check_model=f"{__name__}.checks:check_model",
            refuses_gpu=refuses_gpu,
        )
    )


@hookimpl
def nanotrain_register_monitor(register: Register) -> None:
    """Register ``fp8``."""
    register(
        Component(
            name="fp8",
            config=FP8MonitorConfig,
            factory=f"{__name__}.monitor:FP8Monitor",
            summary="magnitudes of FP8 operands and their underflow, by module",
            requires={"fp8_products"},
            metrics=METRICS,
        )
    )
