"""FP8 on one GPU against bfloat16: kernels, linear layers, experts and whole steps, in turns.

Figures of a device: it refuses to run without one, and is no part of what ``python -m benchmarks`` measures
unless asked for by name.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any, ClassVar

import attrs

from benchmarks.report import spread, verdict

Call = Callable[[], Any]


def refusal() -> str:
    """Return why nothing can be measured here; empty if it can."""
    import torch
    from nanotrain_fp8_deepseek_v3.backends import BACKENDS
    from nanotrain_fp8_deepseek_v3.gemm import Recipe

    if not torch.cuda.is_available():
        return f"it needs a CUDA device, and torch {torch.__version__} finds none"
    return BACKENDS["triton"].refusal(torch.device("cuda"), Recipe())


def heading() -> str:
    """Name the device, the versions and the command."""
    import torch

    found = torch.cuda.get_device_properties(0)
    memory = f"{found.total_memory / 2**30:.0f} GiB, {found.multi_processor_count} multiprocessors"
    versions = f"CUDA {torch.version.cuda}, torch {torch.__version__}, triton {_version('triton')}"
    versions += f", Python {platform.python_version()}"
    return f"{found.name}, {memory}; {versions}; `python -m benchmarks fp8_gpu`"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


@attrs.define(frozen=True)
class Compared:
    """Two sides in turns: the ratio of each round, above 1 where ours is faster."""

    KIND: ClassVar[str] = ""
    TITLE: ClassVar[str] = ""
    HEADER: ClassVar[tuple[str, ...]] = ()

    name: str
    ours: float
    """What is shown: a rate, or a time, the median over rounds."""
    theirs: float
    ratios: tuple[float, ...]
    bar: float = 0.0
    """The least ratio that passes; 0: none."""
    digits: int = 3
    further: tuple[str, ...] = ()
    """Cells of its own."""

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    @property
    def passed(self) -> bool:
        return self.ratio >= self.bar

    def row(self) -> list[str]:
        shown = [f"{each:,.{self.digits}f}" for each in (self.ours, self.theirs)]
        bar = [f"{self.bar:g}", verdict(self.passed)] if self.bar else ["", ""]
        return [self.name, *shown, f"{self.ratio:.2f}", spread(self.ratios, ".2f"), *self.further, *bar]

    def data(self) -> dict[str, Any]:
        return {**attrs.asdict(self), "ratio": self.ratio, "passed": self.passed}


def turns(ours: Call, theirs: Call, *, rounds: int, calls: int = 10) -> tuple[list[float], list[float]]:
    """Return seconds of a call of each side, round by round, by the device's clock; who begins alternates."""
    sides, found = (ours, theirs), ([], [])
    for side in sides * 3:  # compiled, and chosen by the libraries
        side()
    for turn in range(rounds):
        for number in (1, 0) if turn % 2 else (0, 1):
            found[number].append(seconds(sides[number], calls))
    return found


def seconds(call: Call, calls: int) -> float:
    """Return seconds of one of so many calls after one another."""
    import torch

    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(calls):
        call()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3 / calls
