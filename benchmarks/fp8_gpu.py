"""FP8 kernels, layers and experts on a GPU, and how far they are from the emulation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from statistics import median
from typing import Any, ClassVar

import attrs
import torch
import torch.nn.functional as F
from nanotrain_fp8_deepseek_v3.backends import BACKENDS
from nanotrain_fp8_deepseek_v3.gemm import Recipe
from nanotrain_fp8_deepseek_v3.scratch import Scratch
from torch import nn

from benchmarks.gpu import Call, Compared, turns
from benchmarks.report import verdict
from nanotrain_core.layout.roles import Role, tag
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.precision.gemm import use_gemm

#: Tokens, inputs and outputs of DeepSeek-V3's gate of an expert, output of attention, and dense gate.
SHAPES = ((4096, 7168, 2048), (4096, 16384, 7168), (4096, 7168, 18432))
#: Rows, inputs, outputs and experts: 4096 tokens for each of eight, spread unevenly over 32 experts.
EXPERTS = (32768, 7168, 2048, 32)
#: Numbers that are rounded at once, large beside the device's cache: rows and columns.
LARGE = (16384, 7168)
#: The same as of experts, to compare with the emulation.
COMPARED = (2048, 2048, 1536, 4)
DEVICE = "cuda"


@attrs.define(frozen=True)
class Bandwidth(Compared):
    KIND = "fp8_gpu_kernels"
    TITLE = "GB/s read and written, medians: rounding to tiles, and a copy on the device of as many bytes."
    HEADER = ("kernel", "ours", "copy", "ratio", "spread", "bar", "")


@attrs.define(frozen=True)
class Layer(Compared):
    KIND = "fp8_gpu_layers"
    TITLE = "Milliseconds of forward and backward, medians, the weight rounded each time; bfloat16 over FP8."
    HEADER = ("layer", "FP8", "bf16", "ratio", "spread", "bar", "")


@attrs.define(frozen=True)
class Agreement:
    """How much of the bound the largest difference from the emulation takes."""

    KIND: ClassVar[str] = "fp8_gpu_agreement"
    TITLE: ClassVar[str] = (
        "Largest difference from the emulation, as a share of its bound: 2^-12 of the magnitudes that are "
        "added up, and 2^-7 of the result."
    )
    HEADER: ClassVar[tuple[str, ...]] = ("product", "share", "")

    name: str
    share: float

    @property
    def passed(self) -> bool:
        return self.share <= 1.0

    def row(self) -> list[str]:
        return [self.name, f"{self.share:.2f}", verdict(self.passed)]

    def data(self) -> dict[str, Any]:
        return {**attrs.asdict(self), "passed": self.passed}


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def measure(*, rounds: int) -> Iterator[Any]:
    """Measure kernels, layers of both backends, experts and agreement."""
    torch.manual_seed(0)
    yield from kernels(rounds)
    for name in ("triton", "torch"):
        for number, shape in enumerate(SHAPES):
            yield layer(name, shape, rounds, bar=1.3 if name == "triton" and not number else 0.0)
    yield experts(rounds)
    yield experts_later(rounds)
    for name in ("triton", "torch"):
        yield from agreement(name)


def kernels(rounds: int) -> Iterator[Bandwidth]:
    """Time every rounding kernel beside a copy of what it reads and writes."""
    from nanotrain_fp8_deepseek_v3.triton_kernels.blocks import quantize_blocks
    from nanotrain_fp8_deepseek_v3.triton_kernels.rows import quantize_rows
    from nanotrain_fp8_deepseek_v3.triton_kernels.transposed import quantize_transposed, requantize_transposed

    x = normal(*LARGE)
    codes, scales = quantize_rows(x)
    ours: dict[str, tuple[Call, int]] = {  # and bytes for each number, with its part of scales
        "1 x 128": (lambda: quantize_rows(x), 3),
        "128 x 1, transposed": (lambda: quantize_transposed(x), 3),
        "128 x 1, transposed, from 1 x 128": (lambda: requantize_transposed(codes, scales), 2),
        "128 x 128, and transposed": (lambda: quantize_blocks(x), 4),
    }
    for name, (call, each) in ours.items():
        size = each * x.numel()
        source, target = torch.empty(2, size // 2, dtype=torch.uint8, device=DEVICE)
        mine, copies = turns(call, lambda s=source, t=target: t.copy_(s), rounds=rounds)  # type: ignore[misc]
        ratios = tuple(b / a for a, b in zip(mine, copies, strict=True))
        yield Bandwidth(name, size / median(mine) / 1e9, size / median(copies) / 1e9, ratios, 0.8, digits=0)


def layer(name: str, shape: tuple[int, int, int], rounds: int, bar: float) -> Layer:
    """Time a linear layer, its input wanting a gradient."""
    M, K, N = shape
    wide = nn.Linear(K, N, bias=False, device=DEVICE, dtype=torch.bfloat16)
    narrow = tag(nn.Linear(K, N, bias=False, device=DEVICE, dtype=torch.bfloat16), Role.COLUMN)
    narrow.weight.grad_dtype = torch.float32  # as a run has it: dW is not rounded
    passes = Passes()
    use_gemm(narrow, {"weight": BACKENDS[name].make(Recipe(), Scratch(passes))}, passes)
    x, d_y = normal(M, K).requires_grad_(), normal(M, N)

    def step(module: nn.Module) -> None:
        x.grad = module.weight.grad = None
        with passes.weights_unchanged():
            module(x).backward(d_y)

    times = turns(lambda: step(narrow), lambda: step(wide), rounds=rounds)
    return compared(f"{name}, {M} x {K} x {N}", times, bar)


def experts(rounds: int) -> Layer:
    """Time the three products of experts in one launch each, beside torch's grouped product in bfloat16."""
    return _experts(rounds, later=False)


def experts_later(rounds: int) -> Layer:
    """Time the same in a step's second microbatch: the weights are rounded already."""
    return _experts(rounds, later=True)


def _experts(rounds: int, *, later: bool) -> Layer:
    M, K, N, E = EXPERTS
    x, w, d_y = normal(M, K), nn.Parameter(normal(E, N, K)), normal(M, N)
    inputs = cycle((x, normal(M, K)))  # the same one twice would not be rounded again
    shares = torch.rand(E, device=DEVICE).softmax(0).cumsum(0)
    counts = torch.bincount(
        torch.searchsorted(shares, torch.rand(M, device=DEVICE)).clamp_max_(E - 1), minlength=E
    )
    ends = counts.cumsum(0).to(torch.int32)

    passes = Passes()
    backend = BACKENDS["triton"].make(Recipe(), Scratch(passes))

    def microbatch() -> None:
        products = backend.grouped(counts)
        _, kept = products.forward(next(inputs), w)
        products.dgrad(d_y, w)
        products.wgrad(d_y, kept)

    def step() -> None:
        with passes.weights_unchanged():
            microbatch()

    @torch.no_grad()
    def theirs() -> None:
        F.grouped_mm(x, w.mT, offs=ends)
        F.grouped_mm(d_y, w, offs=ends)
        F.grouped_mm(d_y.T, x, offs=ends)

    name = f"triton, {M} rows of {E} experts, {K} x {N}"
    if not later:
        return compared(name, turns(step, theirs, rounds=rounds), 1.2)
    with passes.weights_unchanged():
        return compared(f"{name}, weights rounded before", turns(microbatch, theirs, rounds=rounds), 1.2)


def compared(name: str, times: tuple[list[float], list[float]], bar: float) -> Layer:
    ratios = tuple(b / a for a, b in zip(*times, strict=True))
    ours, theirs = (1e3 * median(each) for each in times)
    return Layer(name, ours, theirs, ratios, bar)


def agreement(name: str) -> Iterator[Agreement]:
    """Compare the products of one weight and of experts with the emulation's, and with sizes from it."""
    M, K, N, E = COMPARED
    counts = torch.tensor([M // 3, 0, 1, M - M // 3 - 1], device=DEVICE)
    one, many = (BACKENDS[each].make(Recipe(), Scratch()) for each in (name, "emulated"))
    ways = (
        ("one weight", one, many, (normal(M, K), normal(N, K), normal(M, N))),
        ("experts", one.grouped(counts), many.grouped(counts), (normal(M, K), normal(E, N, K), normal(M, N))),
    )
    for words, ours, theirs, operands in ways:
        found, expected = (three(each, *operands) for each in (ours, theirs))
        sizes = three(theirs, *(each.abs() for each in operands))  # rounded alike: only signs are gone
        for product, a, b, size in zip(("y", "dx", "dW"), found, expected, sizes, strict=True):
            bound = size.float() * 2.0**-12 + b.float().abs() * torch.finfo(b.dtype).eps
            share = ((a.float() - b.float()).abs() / bound.clamp_min_(1e-30)).max().item()
            yield Agreement(f"{name}, {words}, {product}", share)


def three(products: Any, x: torch.Tensor, w: torch.Tensor, d_y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return y, dx and dW."""
    (y,), kept = products.forward(x, w)
    return y, products.dgrad(d_y, w), products.wgrad(d_y, kept)
