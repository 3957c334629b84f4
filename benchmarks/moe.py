"""What routing costs: a layer of experts against a dense feed-forward layer of the same active FLOPs."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import attrs
import torch
from nanotrain_cpu.kernels import FASTER
from nanotrain_deepseek.config import DeepSeekConfig
from nanotrain_deepseek.moe import MixtureOfExperts
from torch import nn

from benchmarks.report import spread, verdict
from nanotrain_core.models.feed_forward import SwiGLU
from nanotrain_core.models.kernels import installed_kernels

#: Forward and backward of a layer of experts may take so many times as long.
LIMIT = 1.3


@attrs.define(frozen=True)
class Overhead:
    """Milliseconds of forward and backward, medians over rounds, and the ratio of each round."""

    KIND = "experts"
    TITLE = "Milliseconds of forward and backward, medians; the dense layer has as many active FLOPs."
    HEADER = ("layer", "experts", "dense", "ratio", "spread", "limit", "")

    name: str
    experts: float
    dense: float
    ratios: tuple[float, ...]
    limit: float | None = None

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    @property
    def passed(self) -> bool:
        return self.limit is None or self.ratio <= self.limit

    def row(self) -> list[str]:
        times = [f"{self.experts:.1f}", f"{self.dense:.1f}", f"{self.ratio:.2f}"]
        last = ["", ""] if self.limit is None else [f"{self.limit:g}", verdict(self.passed)]
        return [self.name, *times, spread(self.ratios, ".2f"), *last]

    def data(self) -> dict[str, Any]:
        return {**attrs.asdict(self), "ratio": self.ratio, "passed": self.passed}


def measure(*, rounds: int) -> list[Overhead]:
    """Time the experts of ``deepseek.toml`` and wider ones, in one thread, dense and sparse in turns.

    Memory is treated as in a run: otherwise what is measured is how the kernel clears pages.
    """
    cpu = torch.device("cpu")
    installed_kernels(cpu).prepare(cpu)
    shapes = ({"width": 256, "experts": 8, "top_k": 2}, {"width": 512, "experts": 16, "top_k": 4})
    dtypes = ((torch.float32, LIMIT), (torch.bfloat16, None))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [
            overhead(dtype=dtype, limit=limit, rounds=4 * rounds, **shape)
            for shape in shapes
            for dtype, limit in dtypes
        ]
    finally:
        torch.set_num_threads(threads)


def overhead(
    *, width: int, experts: int, top_k: int, dtype: torch.dtype, limit: float | None, rounds: int
) -> Overhead:
    """Race 1024 tokens through ``top_k`` + 1 of ``experts`` + 1 experts of 256, and through a dense layer."""
    inner = 256
    config = DeepSeekConfig(
        layers=2, width=width, heads=4, vocab=64, kv_rank=8, nope_size=8, rope_size=8, value_size=8,
        ffn=inner, experts=experts, top_k=top_k, shared_experts=1, expert_ffn=inner,
    )  # fmt: skip
    torch.manual_seed(0)
    sparse = initialized(MixtureOfExperts(config, FASTER), dtype)
    dense = initialized(SwiGLU(width, (top_k + 1) * inner, FASTER), dtype)
    x = torch.randn(8, 128, width).to(dtype)
    sides: list[tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]] = [
        (sparse, lambda x: sparse(x)[0]),
        (dense, dense),
    ]
    seconds: list[list[float]] = [[], []]
    for _ in range(rounds + 3):
        for taken, (module, forward) in zip(seconds, sides, strict=True):
            taken.append(once(module, forward, x))
    ours, peers = (taken[3:] for taken in seconds)  # the first warm up
    name = f"{top_k} + 1 of {experts} + 1 experts, width {width}, {str(dtype).removeprefix('torch.')}"
    ratios = tuple(mine / theirs for mine, theirs in zip(ours, peers, strict=True))
    return Overhead(name, 1e3 * median(ours), 1e3 * median(peers), ratios, limit)


def initialized(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Draw the weights that a recipe would have drawn."""
    for parameter in module.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
        else:
            nn.init.zeros_(parameter)
    return module.to(dtype)


def once(module: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> float:
    """Return the seconds of a forward and a backward pass."""
    module.zero_grad()
    x = x.detach().requires_grad_()
    began = time.perf_counter()
    forward(x).sum().backward()
    return time.perf_counter() - began
