"""What is said of a stage's activations, on a terminal and on a page."""

from __future__ import annotations

from nanotrain_plan.memory import Activation, StageActivations
from nanotrain_plan.number_format import size, spans


def told_stages(found: StageActivations) -> str:
    """Return the stage that was measured, and those that are like it."""
    others = [stage for stage in found.stages if stage != found.measured]
    return f"stage {found.measured}" + (f" (alike: {spans(others)})" if others else "")


def told_activations(found: StageActivations) -> str:
    """Return how many bytes a stage keeps."""
    told = f"{size(found.bytes)} for each microbatch, kept for backward"
    if found.recomputable:
        left = size(found.bytes - found.recomputable)
        told += f"; {left} where fused kernels compute casts and activation functions again"
    return told


def told_tensor(each: Activation) -> tuple[str, str, str, str]:
    """Return module, operator, shape and dtype."""
    return (
        each.module or "between layers",
        each.op.removeprefix("aten::").strip("_"),
        " x ".join(map(str, each.shape)) or "scalar",
        each.dtype,
    )


def told_layers(found: StageActivations) -> str:
    """Return the bytes of each layer: ``embed 1.05 MB, layers.0 to 3 each 12.6 MB``."""
    return ", ".join(f"{layer} {size(n)}" for layer, n in _grouped(found.layers))


def _grouped(layers: dict[str, int]) -> list[tuple[str, int]]:
    """Return layers in order, consecutive ones of equal size as one."""
    found: list[tuple[str, str, int]] = []
    for layer, n in layers.items():
        if found and found[-1][2] == n and layer.startswith("layers."):
            found[-1] = (found[-1][0], layer, n)
        else:
            found.append((layer, layer, n))
    return [(a if a == b else f"{a} to {b.rpartition('.')[2]} each", n) for a, b, n in found if n >= 1000]
