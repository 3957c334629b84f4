"""Whole steps on a GPU through the engine, in FP8 and in bfloat16, in turns.

In each turn a side is built, warmed up, timed and given back before the other begins: both together, weights,
gradients and moments, do not fit into 80 GB.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

import attrs
import torch

from benchmarks.gpu import Compared
from nanotrain_core.engine import RuntimeEngine
from nanotrain_core.recipe import load_recipe

#: Makes one side, from nothing.
Build = Callable[[], RuntimeEngine]

FOLDER = Path(__file__).parent
MODELS = {"dense": FOLDER / "gpu_dense.toml", "experts": FOLDER / "gpu_moe.toml"}
PRECISIONS = {
    "triton": ('precision.use="fp8_deepseek_v3"', 'precision.backend="triton"'),
    "torch": ('precision.use="fp8_deepseek_v3"', 'precision.backend="torch"'),
}
#: Dense bfloat16 FLOP/s of a device, by what its name holds: NVIDIA's data sheets, without sparsity.
PEAKS = {"H200": 989e12, "H100": 989e12}


@attrs.define(frozen=True)
class Steps(Compared):
    KIND = "fp8_gpu_steps"
    TITLE = "Tokens/s of training on one GPU, medians; MFU is of bfloat16's peak for both."
    HEADER = ("model", "FP8", "bf16", "ratio", "spread", "parameters", "MFU FP8", "MFU bf16", "bar", "")


def measure(
    *, rounds: int, steps: int, device: str = "cuda", overrides: tuple[str, ...] = ()
) -> Iterator[Steps]:
    """Let each model train in FP8 and in bfloat16 in turns of ``steps`` steps."""
    for model, file in MODELS.items():
        for backend, precision in PRECISIONS.items():
            narrow, wide = (
                partial(engine, file, (*overrides, *more), device)
                for more in (precision, ('precision.use="bf16"',))
            )
            yield race(f"{model}, {backend}", narrow, wide, rounds=rounds, steps=steps)


def engine(file: Path, overrides: tuple[str, ...], device: str) -> RuntimeEngine:
    """Build one side."""
    recipe = load_recipe(file, overrides=[*overrides, f'run.device="{device}"'], ranks=1)
    return RuntimeEngine.from_recipe(recipe, device=device)


@attrs.define(frozen=True)
class Timed:
    """One turn of one side."""

    tokens_per_second: float
    parameters: int
    flops_per_token: float


def race(name: str, narrow: Build, wide: Build, *, rounds: int, steps: int) -> Steps:
    """Return tokens/s of both sides, each alone in memory; who begins a round alternates."""
    sides: tuple[list[Timed], list[Timed]] = ([], [])
    for turn in range(rounds):
        for number in (1, 0) if turn % 2 else (0, 1):
            sides[number].append(alone((narrow, wide)[number], steps))
    rates = [[each.tokens_per_second for each in side] for side in sides]
    ours, theirs = (median(each) for each in rates)
    ratios = tuple(a / b for a, b in zip(*rates, strict=True))
    model = sides[1][0]
    further = (
        f"{model.parameters / 1e9:.2f}B",
        *(mfu(model.flops_per_token * rate) for rate in (ours, theirs)),
    )
    return Steps(name, ours, theirs, ratios, digits=0, further=further)


def alone(build: Build, steps: int) -> Timed:
    """Build a side, time a turn after one to warm up, and give its memory back."""
    try:
        return timed(build(), steps)
    finally:  # nothing holds the side any more: a list of stages and their hooks do hold each other
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def timed(side: RuntimeEngine, steps: int) -> Timed:
    """Return the tokens/s of a turn, after one to warm up."""
    seconds(side, steps)
    rate = steps * side.run.feed.tokens_per_step / seconds(side, steps)
    parameters = sum(p.numel() for part in side.run.stages.values() for p in part.parameters())
    return Timed(rate, parameters, side.run.flops_per_token)


def seconds(side: RuntimeEngine, steps: int) -> float:
    """Return seconds of so many steps more, the device's work included."""
    wait: Callable[[], object] = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    began = time.perf_counter()
    side.fit(steps=side.step + steps)
    wait()
    return time.perf_counter() - began


def mfu(flops: float) -> str:
    """Return the share of the device's peak; nothing where that is not known."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    peak = next((peak for known, peak in PEAKS.items() if known in name), 0.0)
    return f"{flops / peak:.1%}" if peak else ""
