"""FP8 kernels, layers and experts on a GPU, and how far they are from the emulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from itertools import cycle
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from nanotrain_fp8_deepseek_v3.backends import BACKENDS
from nanotrain_fp8_deepseek_v3.gemm import FP8Recipe
from nanotrain_fp8_deepseek_v3.operand_cache import OperandCache
from torch import nn

from benchmarks.gpu.bars import BARS
from benchmarks.gpu.records import Recorder
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.turns import Call, turns
from nanotrain_core.layout.roles import Role, tag
from nanotrain_core.models.ops import swiglu
from nanotrain_core.pipeline.passes import Passes
from nanotrain_core.precision.gemm import use_gemm


@attrs.define(frozen=True)
class Sizes:
    """What is multiplied and rounded."""

    device: str = "cuda"
    layers: tuple[tuple[int, int, int], ...] = ((4096, 7168, 2048), (4096, 16384, 7168), (4096, 7168, 18432))
    """Tokens, inputs and outputs of DeepSeek-V3's gate of an expert, output of attention, and dense gate."""
    experts: tuple[int, int, int, int] = (32768, 7168, 2048, 32)
    """Rows, inputs, outputs and experts: 4096 tokens for each of eight, spread unevenly over 32 experts."""
    rounded: tuple[int, int] = (16384, 7168)
    """Rows and columns rounded at once, large beside the device's cache."""
    compared: tuple[int, int, int, int] = (2048, 2048, 1536, 4)
    """The same as of experts, to compare with the emulation."""
    backends: tuple[str, ...] = ("triton", "torch")
    rounds: int = 9
    calls: int = 10

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16)

    def judged(self, passed: bool) -> bool | None:
        """Return what a row says of a bar: nothing on a CPU."""
        return None if self.device == "cpu" else passed

    def race(self, ours: Call, theirs: Call) -> Any:
        return turns(ours, theirs, rounds=self.rounds, calls=self.calls, device=self.device)


TINY = Sizes(
    device="cpu",
    layers=((16, 128, 128),),
    experts=(32, 128, 128, 2),
    rounded=(128, 128),
    compared=(128, 128, 128, 4),
    backends=("emulated",),
    rounds=1,
    calls=1,
)


def run(settings: Settings) -> None:
    """Measure rounding kernels, layers and experts."""
    record, sizes = Recorder(settings.records), TINY if settings.smoke else Sizes()
    torch.manual_seed(0)
    slowest = []
    kernels = rounding_kernels(sizes)
    if find_spec("triton") is None:
        record.left_out("rounding", "triton is not installed: pip install triton", "rounding")
        kernels = {}
    for name, (make, each) in kernels.items():
        with record.attempt(f"rounding, {name}", "rounding"):
            slowest.append(rounding(record, sizes, name, make(), each))
    if slowest and len(slowest) == len(kernels):
        record.bar("rounding", min(slowest))
    if slowest:
        with record.attempt("SwiGLU and its rounding at once"):
            swiglu_at_once(record, sizes)
    with record.attempt("FP8 experts", "fp8-experts"):
        record.bar("fp8-experts", experts(record, sizes, later=False))
        experts(record, sizes, later=True)
    for backend in sizes.backends:
        for shape in sizes.layers:
            with record.attempt(f"FP8 layer, {backend}, {shape}"):
                layer(record, sizes, backend, shape)


def compare(settings: Settings) -> None:
    """Measure the largest difference from the emulation."""
    record, sizes = Recorder(settings.records), TINY if settings.smoke else Sizes()
    torch.manual_seed(0)
    for backend in sizes.backends:
        with record.attempt(f"FP8 {backend} against the emulation"):
            for name, share in agreement(sizes, backend):
                record.row(
                    "equality",
                    what=f"FP8 {name}",
                    against="emulation",
                    difference=f"{share:.2f} of its bound",
                    bound="1",
                    ok=share <= 1,
                )


#: Makes the call of a kernel.
Make = Callable[[], Call]


def rounding_kernels(sizes: Sizes) -> dict[str, tuple[Make, int]]:
    """Return every rounding kernel, and what bytes it reads and writes for each number, without scales."""

    def rows() -> Call:
        from nanotrain_fp8_deepseek_v3.triton_kernels.quantize_rows import quantize_rows

        return partial(quantize_rows, sizes.normal(*sizes.rounded))

    def transposed() -> Call:
        from nanotrain_fp8_deepseek_v3.triton_kernels.quantize_transposed import quantize_transposed

        return partial(quantize_transposed, sizes.normal(*sizes.rounded))

    def again() -> Call:
        from nanotrain_fp8_deepseek_v3.triton_kernels.quantize_rows import quantize_rows
        from nanotrain_fp8_deepseek_v3.triton_kernels.quantize_transposed import requantize_transposed

        return partial(requantize_transposed, *quantize_rows(sizes.normal(*sizes.rounded)))

    def blocks() -> Call:
        from nanotrain_fp8_deepseek_v3.triton_kernels.quantize_blocks import quantize_blocks

        return partial(quantize_blocks, sizes.normal(*sizes.rounded))

    def of_swiglu() -> Call:
        from nanotrain_fp8_deepseek_v3.triton_kernels.quantize_swiglu import quantize_swiglu

        return partial(quantize_swiglu, sizes.normal(*sizes.rounded), sizes.normal(*sizes.rounded))

    def recompute_swiglu(*, gradient: bool) -> Call:
        from nanotrain_fp8_deepseek_v3.fused import cropped
        from nanotrain_fp8_deepseek_v3.triton_kernels.quantize_rows import quantize_rows
        from nanotrain_fp8_deepseek_v3.triton_kernels.quantize_swiglu import requantize_swiglu

        gate, up = (cropped(quantize_rows(x), x) for x in (sizes.normal(*sizes.rounded) for _ in range(2)))
        d_h = sizes.normal(*sizes.rounded) if gradient else None
        return partial(requantize_swiglu, gate, up, torch.bfloat16, d_h)

    return {
        "1 x 128": (rows, 3),
        "128 x 1, transposed": (transposed, 3),
        "128 x 1, transposed, from 1 x 128": (again, 2),
        "128 x 128, and transposed": (blocks, 4),
        "SwiGLU, with 1 x 128 of gate, up and output": (of_swiglu, 7),
        "SwiGLU again, from 1 x 128 to 1 x 128": (partial(recompute_swiglu, gradient=False), 3),
        "SwiGLU backward, from 1 x 128, with 1 x 128 of the output": (
            partial(recompute_swiglu, gradient=True),
            9,
        ),
    }


def rounding(record: Recorder, sizes: Sizes, name: str, call: Call, each: int) -> float:
    """Race a rounding kernel against a copy of as many bytes as it reads and writes; return the ratio."""
    rows, columns = sizes.rounded
    size = each * rows * columns
    source, target = torch.empty(2, size // 2, dtype=torch.uint8, device=sizes.device)
    raced = sizes.race(call, lambda: target.copy_(source))
    bar = BARS["rounding"].wanted
    cells = raced.cells(lambda seconds: size / seconds / 1e9, ",.0f")
    record.row(
        "rounding to FP8 and a copy, GB/s", kernel=name, **cells, bar=bar, ok=sizes.judged(raced.ratio >= bar)
    )
    ratio: float = raced.ratio
    return ratio


def swiglu_at_once(record: Recorder, sizes: Sizes) -> None:
    """Race SwiGLU and its rounding in one kernel against torch's SwiGLU and a kernel for each tensor."""
    from nanotrain_fp8_deepseek_v3.triton_kernels.quantize_rows import quantize_rows
    from nanotrain_fp8_deepseek_v3.triton_kernels.quantize_swiglu import quantize_swiglu

    gate, up = sizes.normal(*sizes.rounded), sizes.normal(*sizes.rounded)
    computed = torch.compile(swiglu, disable=sizes.device == "cpu")

    def apart() -> None:
        for x in (gate, up, computed(gate, up)):
            quantize_rows(x)

    raced = sizes.race(partial(quantize_swiglu, gate, up), apart)
    cells = raced.cells(lambda seconds: 1e3 * seconds, ".3f")
    record.row("SwiGLU and its rounding, at once and one after the other, ms", **cells)


def layer(record: Recorder, sizes: Sizes, backend: str, shape: tuple[int, int, int]) -> None:
    """Race forward and backward of a linear layer, its input wanting a gradient, against bfloat16."""
    M, K, N = shape
    wide = nn.Linear(K, N, bias=False, device=sizes.device, dtype=torch.bfloat16)
    narrow = tag(nn.Linear(K, N, bias=False, device=sizes.device, dtype=torch.bfloat16), Role.COLUMN)
    narrow.weight.grad_dtype = torch.float32  # as a run has it: dW is not rounded
    passes = Passes()
    use_gemm(narrow, {"weight": BACKENDS[backend].make(FP8Recipe(), OperandCache(passes))}, passes)
    x, d_y = sizes.normal(M, K).requires_grad_(), sizes.normal(M, N)

    def step(module: nn.Module) -> None:
        x.grad = module.weight.grad = None
        with passes.weights_unchanged():
            module(x).backward(d_y)

    raced = sizes.race(partial(step, narrow), partial(step, wide))
    show(record, sizes, f"{backend}, {M} x {K} x {N}", raced)


def show(record: Recorder, sizes: Sizes, name: str, raced: Any, bar: float | None = None) -> None:
    passed = None if bar is None else sizes.judged(raced.ratio >= bar)
    cells = raced.cells(lambda seconds: 1e3 * seconds, ".3f")
    record.row(
        "FP8 and bfloat16, forward and backward, ms",
        layer=name,
        **cells,
        bar="" if bar is None else bar,
        ok=passed,
    )


def experts(record: Recorder, sizes: Sizes, *, later: bool) -> float:
    """Race the three products of experts against torch's grouped product in bfloat16; return the ratio.

    ``later``: in a step's second microbatch, when the weights have been rounded.
    """
    M, K, N, E = sizes.experts
    x, w, d_y = sizes.normal(M, K), nn.Parameter(sizes.normal(E, N, K)), sizes.normal(M, N)
    inputs = cycle((x, sizes.normal(M, K)))  # the same one twice would not be rounded again
    shares = torch.rand(E, device=sizes.device).softmax(0).cumsum(0)
    chosen = torch.searchsorted(shares, torch.rand(M, device=sizes.device)).clamp_max_(E - 1)
    counts = torch.bincount(chosen, minlength=E)
    ends = counts.cumsum(0).to(torch.int32)
    passes, name = Passes(), sizes.backends[0]
    backend = BACKENDS[name].make(FP8Recipe(), OperandCache(passes))

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

    with passes.weights_unchanged() if later else nullcontext():
        raced = sizes.race(microbatch if later else step, theirs)
    words = f"{name}, {M} rows of {E} experts, {K} x {N}" + (", weights rounded before" if later else "")
    show(record, sizes, words, raced, BARS["fp8-experts"].wanted)
    ratio: float = raced.ratio
    return ratio


def agreement(sizes: Sizes, backend: str) -> Iterator[tuple[str, float]]:
    """Compare the products of one weight and of experts with the emulation's, and with sizes from it.

    Yields each product's name and its largest difference, as a share of the bound: 2^-12 of the magnitudes
    that are added up, and 2^-7 of the result.
    """
    M, K, N, E = sizes.compared
    counts = torch.tensor([M // 3, 0, 1, M - M // 3 - 1], device=sizes.device)
    one, many = (BACKENDS[each].make(FP8Recipe(), OperandCache()) for each in (backend, "emulated"))
    normal = sizes.normal
    ways = (
        ("one weight", one, many, (normal(M, K), normal(N, K), normal(M, N))),
        ("experts", one.grouped(counts), many.grouped(counts), (normal(M, K), normal(E, N, K), normal(M, N))),
    )
    for words, ours, theirs, operands in ways:
        found, expected = (three(each, *operands) for each in (ours, theirs))
        magnitudes = three(theirs, *(each.abs() for each in operands))  # rounded alike: only signs are gone
        for product, a, b, size in zip(("y", "dx", "dW"), found, expected, magnitudes, strict=True):
            bound = size.float() * 2.0**-12 + b.float().abs() * torch.finfo(b.dtype).eps
            share = ((a.float() - b.float()).abs() / bound.clamp_min_(1e-30)).max().item()
            yield f"{backend}, {words}, {product}", share


def three(products: Any, x: torch.Tensor, w: torch.Tensor, d_y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return y, dx and dW."""
    (y,), kept = products.forward(x, w)
    return y, products.dgrad(d_y, w), products.wgrad(d_y, kept)
