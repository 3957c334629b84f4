"""What each kernel of nanotrain-cpu gains in a training step: plain PyTorch with that one, against without.

Each side is a process of one thread, and they take turns. A step is timed by the processor time that it took:
on a machine that is busy with others, the clock tells mostly of them. In one process sides would share the
shapes that oneDNN has prepared for, which is half of what experts cost.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from operator import truediv
from statistics import median
from typing import Any

import attrs
import torch
from nanotrain_cpu.gemm import use_faster_products
from nanotrain_cpu.kernels import FASTER
from nanotrain_cpu.memory import keep_freed_memory
from torch import nn

from benchmarks.cases import DEEPSEEK, RECIPE, Case
from benchmarks.report import spread
from nanotrain_core.component import Component
from nanotrain_core.contracts import Kernels
from nanotrain_core.engine import RuntimeEngine
from nanotrain_core.models.ops import TORCH_OPS, Ops
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.recipe.tree import Selection
from nanotrain_core.registry.discovery import PluginInfo
from nanotrain_core.registry.registry import Registry, load_plugins

Apply = Callable[[nn.Module, Passes], None]

#: Which functions of the table, and who changes a model's parts.
EACH: Mapping[str, tuple[tuple[str, ...], tuple[Apply, ...]]] = {
    "attention": (("attention",), ()),
    "experts": (("experts",), ()),
    "norm and rope": (("rms_norm", "rope"), ()),
    "matmul": ((), (use_faster_products,)),
    "loss": (("linear_cross_entropy",), ()),
}

#: All of them.
ALL = "all"

#: A microbatch of the small DeepSeek has 256 tokens, or all 1024 of a step.
CASES = tuple(
    Case(name=f"{name}, {precision}", file=file, precision=precision, microbatch=size, accumulate=number)
    for name, file, size, number in (
        ("Llama", RECIPE, 4, 2),
        ("DeepSeek", DEEPSEEK, 2, 4),
        ("DeepSeek, 1 microbatch", DEEPSEEK, 8, 1),
    )
    for precision in ("fp32", "bf16")
)


@attrs.define(frozen=True)
class OneKernel:
    """Config of kernels that are plain PyTorch but for one."""

    name: str = ""


class Alone(Kernels):
    """Plain PyTorch but for one kernel, or with all of them."""

    def __init__(self, config: OneKernel) -> None:
        chosen = [EACH[config.name]] if config.name in EACH else [*EACH.values()] if config.name else []
        self.functions = {name: getattr(FASTER, name) for functions, _ in chosen for name in functions}
        self.applied = dict.fromkeys(apply for _, applied in chosen for apply in applied)

    def prepare(self, device: torch.device) -> None:
        """Have freed memory kept on both sides."""
        keep_freed_memory()

    def ops(self, device: torch.device) -> Ops:
        """Return plain PyTorch but for these."""
        return replace(TORCH_OPS, **self.functions)

    def apply(self, part: nn.Module, passes: Passes) -> None:
        """Change what these change."""
        for apply in self.applied:
            apply(part, passes)


@attrs.define(frozen=True)
class Gain:
    """Milliseconds of processor time of a step, medians, and in each round without over with."""

    KIND = "kernels"
    TITLE = "Milliseconds of processor time of a training step in one thread, medians over rounds."
    HEADER = ("model", "kernel", "with", "without", "ratio", "spread")
    passed = True

    case: str
    kernel: str
    ours: float
    torchs: float
    ratios: tuple[float, ...]

    def row(self) -> list[str]:
        times = [f"{self.ours:.0f}", f"{self.torchs:.0f}", f"{median(self.ratios):.3f}"]
        low, high = (quantile(self.ratios, part) for part in (0.25, 0.75))
        return [self.case, self.kernel, *times, spread((low, high), ".3f")]

    def data(self) -> dict[str, Any]:
        return {**attrs.asdict(self), "ratio": median(self.ratios)}


def quantile(numbers: Sequence[float], part: float) -> float:
    """Return the number below which that part of them lies."""
    return sorted(numbers)[round(part * (len(numbers) - 1))]


def measure(*, rounds: int, cases: Sequence[Case] = CASES) -> list[Gain]:
    """Take ``rounds`` rounds of a step with each kernel, and one without any, in a new order each."""
    return [gain for case in cases for gain in raced(case, rounds)]


def raced(case: Case, rounds: int) -> list[Gain]:
    """Return what every kernel gains in one case."""
    spawn, order = multiprocessing.get_context("spawn"), ["", *EACH, ALL]
    taken: dict[str, list[float]] = {name: [] for name in order}
    with contextlib.ExitStack() as stack:
        sides = {
            name: stack.enter_context(ProcessPoolExecutor(1, spawn, begin, (case, name))) for name in order
        }
        shuffled = random.Random(0)
        for _ in range(rounds + 2):
            shuffled.shuffle(order)
            for name in order:
                taken[name].append(sides[name].submit(step).result())
    torchs, *_ = kept = [times[2:] for times in taken.values()]  # the first warm up
    return [
        Gain(case.name, name, median(ours), median(torchs), tuple(map(truediv, torchs, ours)))
        for name, ours in zip(taken, kept, strict=True)
        if name
    ]


_engines: list[RuntimeEngine] = []


def begin(case: Case, name: str) -> None:
    """Be a side from now on."""
    torch.set_num_threads(1)
    _engines.append(engine(case, name))


def step() -> float:
    """Take a step and return its milliseconds."""
    (side,) = _engines
    began = time.process_time()
    side.fit(steps=side.step + 1)
    return 1e3 * (time.process_time() - began)


def engine(case: Case, name: str) -> RuntimeEngine:
    """Return an engine of the case's recipe that has this kernel alone."""
    component = Component(
        name="benchmark", config=OneKernel, factory="benchmarks.kernels:Alone", summary="one kernel alone"
    )
    plugin = PluginInfo(
        name="benchmark",
        distribution="benchmarks",
        version="0",
        module=__name__,
        components=(("kernels", component),),
    )
    registry = Registry((*load_plugins().plugins, plugin))
    recipe = attrs.evolve(case.recipe(), kernels=Selection("kernels", "benchmark", OneKernel(name)))
    return RuntimeEngine.from_recipe(recipe, registry=registry)
