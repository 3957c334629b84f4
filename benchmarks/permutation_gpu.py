"""Rows between tokens and experts on a GPU: Triton's kernels beside plain PyTorch, and beside a copy.

``python -m benchmarks.permutation_gpu [--rounds N]``
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from statistics import median

import attrs
import torch
from nanotrain_cuda.permutation import permute, unpermute

from benchmarks.gpu import Call, Compared, turns
from nanotrain_core.api.torch import TORCH, inverted
from nanotrain_core.moe.routing import sort_by_expert

#: Tokens, width, experts chosen and experts, of DeepSeek-V3 and of `gpu_moe.toml`.
SHAPES = ((4096, 7168, 8, 256), (16384, 2048, 6, 64))
DEVICE = "cuda"


@attrs.define(frozen=True)
class Permutation(Compared):
    KIND = "permutation_gpu"
    TITLE = "Milliseconds, medians: experts' rows in bfloat16, Triton's kernels and what they stand beside."
    HEADER = ("rows", "ours", "theirs", "ratio", "spread", "bar", "")


@attrs.define(frozen=True, eq=False)
class Way:
    """One direction, in both ways, and the least bytes that it could move."""

    name: str
    ours: Call
    theirs: Call
    bytes: int


def measure(*, rounds: int) -> Iterator[Permutation]:
    """Measure each direction beside plain PyTorch's, then beside a copy on the device of as many bytes."""
    torch.manual_seed(0)
    for T, D, C, E in SHAPES:
        for way in ways(T, D, C, E):
            name = f"{way.name}, {T} x {D}, {C} of {E}"
            source, target = torch.empty(2, way.bytes // 2, dtype=torch.uint8, device=DEVICE)
            others: dict[str, tuple[Call, float]] = {
                "plain PyTorch": (way.theirs, 1.0),
                "a copy": (lambda s=source, t=target: t.copy_(s), 0.8),  # type: ignore[misc]
            }
            for other, (call, bar) in others.items():
                mine, yours = turns(way.ours, call, rounds=rounds)
                ratios = tuple(b / a for a, b in zip(mine, yours, strict=True))
                yield Permutation(f"{name}; {other}", 1e3 * median(mine), 1e3 * median(yours), ratios, bar)


def ways(T: int, D: int, C: int, E: int) -> Iterator[Way]:
    """Yield permutation and weighted sum, forward, and backward alone."""
    order, _ = sort_by_expert(torch.rand(T, E, device=DEVICE).topk(C).indices, E)
    back = inverted(order)
    x, outputs = (torch.randn(n, D, device=DEVICE, dtype=torch.bfloat16).requires_grad_() for n in (T, T * C))
    weights = torch.rand(T, C, device=DEVICE).requires_grad_()
    row = 2 * T * D

    def calls(function: Callable[[], torch.Tensor], of: tuple[torch.Tensor, ...]) -> tuple[Call, Call]:
        y = function()
        d_y = torch.randn_like(y)
        return function, lambda: torch.autograd.grad(y, of, d_y, retain_graph=True)

    pairs = [
        calls(lambda f=f: f(x, order, back, C), (x,))  # type: ignore[misc]
        for f in (permute, TORCH.permute)
    ]
    yield Way("permute", pairs[0][0], pairs[1][0], row * (C + 1))
    yield Way("permute, backward", pairs[0][1], pairs[1][1], row * (C + 1))
    pairs = [
        calls(lambda f=f: f(outputs, order, back, weights), (outputs, weights))  # type: ignore[misc]
        for f in (unpermute, TORCH.unpermute)
    ]
    yield Way("unpermute", pairs[0][0], pairs[1][0], row * (C + 1))
    yield Way("unpermute, backward", pairs[0][1], pairs[1][1], row * (2 * C + 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    if not torch.cuda.is_available():
        raise SystemExit(f"it needs a CUDA device, and torch {torch.__version__} finds none")
    for each in measure(rounds=rounds):
        print("  ".join(each.row()))


if __name__ == "__main__":
    main()
