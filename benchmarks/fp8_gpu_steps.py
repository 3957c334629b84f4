"""Whole steps on a GPU through the engine, in FP8 and in bfloat16, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import attrs
import torch

from benchmarks.gpu import Compared
from nanotrain_core.engine import RuntimeEngine
from nanotrain_core.recipe import load_recipe

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
                engine(file, (*overrides, *more), device) for more in (precision, ('precision.use="bf16"',))
            )
            yield race(f"{model}, {backend}", narrow, wide, rounds=rounds, steps=steps)
            del narrow, wide
            torch.cuda.empty_cache()


def engine(file: Path, overrides: tuple[str, ...], device: str) -> RuntimeEngine:
    """Build one side."""
    recipe = load_recipe(file, overrides=[*overrides, f'run.device="{device}"'], ranks=1)
    return RuntimeEngine.from_recipe(recipe, device=device)


def race(name: str, narrow: RuntimeEngine, wide: RuntimeEngine, *, rounds: int, steps: int) -> Steps:
    """Return tokens/s of both, after a turn to warm up."""
    sides = narrow, wide
    rates: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 1):
        for number in (1, 0) if turn % 2 else (0, 1):
            taken = seconds(sides[number], steps)
            if turn:
                rates[number].append(steps * narrow.run.feed.tokens_per_step / taken)
    ours, theirs = (median(each) for each in rates)
    ratios = tuple(a / b for a, b in zip(*rates, strict=True))
    parameters = sum(p.numel() for part in wide.run.stages.values() for p in part.parameters())
    further = (f"{parameters / 1e9:.2f}B", *(mfu(wide.run.flops_per_token * rate) for rate in (ours, theirs)))
    return Steps(name, ours, theirs, ratios, digits=0, further=further)


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
