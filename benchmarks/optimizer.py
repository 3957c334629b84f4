"""What an optimizer's step costs the host: our AdamW against torch's clipping and fused AdamW, in turns.

The model has many parameters and next to no elements, so that what is measured is calls, not arithmetic: on a
GPU, which computes beside the host, it is what must fit under the kernels. Both sides are given the same
gradients and forget them, and a step is timed by the processor time that it took.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from operator import truediv
from statistics import median
from typing import Any

import attrs
import torch
from torch import nn

from benchmarks.report import spread, verdict
from nanotrain_core.builtin.configs import AdamWConfig, PrecisionConfig
from nanotrain_core.layout.gradients import LocalGradients
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import place, placed_parameters
from nanotrain_core.optim.adamw import AdamW
from nanotrain_core.precision.uniform import bf16, fp32

#: Parameters of the model, half of them matrices, and elements of each.
PARAMETERS, ELEMENTS = 200, 8

PRECISIONS = {"fp32": fp32, "bf16": bf16}

CONFIG = AdamWConfig(clip_norm=1.0)


@attrs.define(frozen=True)
class HostTime:
    """Milliseconds of processor time of a step, medians, and in each round torch's over ours."""

    KIND = "optimizer"
    TITLE = (
        f"Milliseconds of processor time of a step of AdamW, {PARAMETERS} parameters of {ELEMENTS} elements."
    )
    HEADER = ("precision", "ours", "torch's", "ratio", "spread", "bar", "")
    BAR = 0.9

    precision: str
    ours: float
    torchs: float
    ratios: tuple[float, ...]

    @property
    def passed(self) -> bool:
        return median(self.ratios) >= self.BAR

    def row(self) -> list[str]:
        numbers = [f"{self.ours:.2f}", f"{self.torchs:.2f}", f"{median(self.ratios):.2f}"]
        return [self.precision, *numbers, spread(self.ratios, ".2f"), f"{self.BAR:.1f}", verdict(self.passed)]

    def data(self) -> dict[str, Any]:
        return {**attrs.asdict(self), "ratio": median(self.ratios), "bar": self.BAR, "passed": self.passed}


def measure(*, rounds: int, steps: int = 50) -> list[HostTime]:
    """Take ``rounds`` turns of ``steps`` steps of each side, after one to warm up."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [raced(name, rounds, steps) for name in PRECISIONS]
    finally:
        torch.set_num_threads(threads)


def raced(precision: str, rounds: int, steps: int) -> HostTime:
    """Race one precision against torch's AdamW on float32 parameters."""
    mine, other = times(precision, HOST, rounds, partial(milliseconds, steps=steps))
    return HostTime(precision, median(mine), median(other), tuple(map(truediv, other, mine)))


@attrs.define(frozen=True)
class Shape:
    """Of the model."""

    parameters: int = PARAMETERS
    elements: int = ELEMENTS
    device: str = "cpu"


#: Calls and no arithmetic.
HOST = Shape()

#: What takes a step on the gradients of some parameters, and forgets them.
Step = Callable[[], object]


def times(
    precision: str, shape: Shape, rounds: int, timed: Callable[[list[nn.Parameter], Step], float]
) -> tuple[list[float], list[float]]:
    """Return what ``timed`` says of ours and of torch's in each round, after one to warm up."""
    sides = [ours(precision, shape), torchs(shape)]
    taken: list[list[float]] = [[], []]
    for number in range(rounds + 1):
        for side in (0, 1) if number % 2 else (1, 0):
            taken[side].append(timed(*sides[side]))
    return taken[0][1:], taken[1][1:]


def milliseconds(parameters: list[nn.Parameter], step: Step, steps: int) -> float:
    """Return the median processor time of a step; handing out gradients, backward's work, is not in it."""
    return _median_time(parameters, step, steps, time.process_time)


def wall_time(parameters: list[nn.Parameter], step: Step, steps: int) -> float:
    """Return the median milliseconds from a step's begin to its end on the parameters' device."""
    on_gpu = parameters[0].is_cuda

    def now() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    return _median_time(parameters, step, steps, now)


def _median_time(parameters: list[nn.Parameter], step: Step, steps: int, now: Callable[[], float]) -> float:
    gradients = [torch.full_like(parameter, 0.1, dtype=torch.float32) for parameter in parameters]
    taken = []
    for _ in range(steps):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        began = now()
        step()
        taken.append(1e3 * (now() - began))
    return median(taken)


def model(shape: Shape) -> nn.Module:
    """Return parameters, every second of them a matrix."""
    count, size = shape.parameters, shape.elements
    shapes = [(2, size // 2) if number % 2 else (size,) for number in range(count)]
    return nn.ParameterList([nn.Parameter(torch.ones(each, device=shape.device)) for each in shapes])


def ours(precision: str, shape: Shape = HOST) -> tuple[list[nn.Parameter], Step]:
    """Return the parameters of a model and what takes a step on their gradients and forgets them."""
    numbers = PRECISIONS[precision](PrecisionConfig())
    part = model(shape).to(numbers.parameter_dtype)
    mesh = Mesh(Layout({"dense": View(("dp",), (1,))}), device=shape.device)
    placed = placed_parameters([part], place([part], mesh.layout))
    gradients, optimizer = LocalGradients(), AdamW(CONFIG)
    gradients.attach(placed, mesh, numbers.gradient_dtype)
    optimizer.setup(placed, numbers, gradients, mesh)

    def step() -> None:
        optimizer.step()
        gradients.zero()

    return list(part.parameters()), step


def torchs(shape: Shape = HOST) -> tuple[list[nn.Parameter], Step]:
    """Return the same of plain PyTorch, with float32 parameters that nothing is copied to."""
    parameters = list(model(shape).parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": CONFIG.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=CONFIG.lr, betas=CONFIG.betas, eps=CONFIG.eps, fused=True)

    def step() -> None:
        nn.utils.clip_grad_norm_(parameters, CONFIG.clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    return parameters, step
