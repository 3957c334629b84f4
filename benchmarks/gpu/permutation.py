"""A router's choice, and rows between tokens and experts: nanotrain-cuda's kernels beside plain PyTorch.

Those that move rows are also beside a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs
import torch
from nanotrain_cuda.permutation import permute, unpermute
from nanotrain_cuda.top_k import choose_experts

from benchmarks.gpu.records import Recorder
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.turns import Call, turns
from nanotrain_core.api.torch import TORCH_OPS, invert_permutation
from nanotrain_core.moe.routing import sort_by_expert
from nanotrain_core.moe.top_k import choose_experts as plain

#: Tokens, width, experts chosen and experts: of DeepSeek-V3, and of `experts.toml`.
SHAPES = ((4096, 7168, 8, 256), (16384, 2048, 6, 64))
TINY = ((8, 16, 2, 4),)
#: Tokens, experts, experts chosen, groups and groups chosen, with a bias: of DeepSeek-V3, and without groups.
CHOICES = ((16384, 256, 8, 8, 4), (16384, 64, 6, 1, 1))
TINY_CHOICES = ((8, 16, 2, 4, 2),)


@attrs.define(frozen=True, eq=False)
class Way:
    """One direction, in both ways, and the least bytes that it could move."""

    name: str
    ours: Call
    theirs: Call
    bytes: int


def run(settings: Settings) -> None:
    """Measure each direction beside plain PyTorch's, then beside a copy of as many bytes."""
    record, device = Recorder(settings.records), "cpu" if settings.smoke else "cuda"
    rounds, calls = (1, 1) if settings.smoke else (9, 10)
    torch.manual_seed(0)
    for shape in TINY if settings.smoke else SHAPES:
        T, D, C, E = shape
        with record.attempt(f"permutation, {shape}"):
            for way in ways(device, *shape):
                source, target = torch.empty(2, way.bytes // 2, dtype=torch.uint8, device=device)
                others: dict[str, tuple[Call, float]] = {
                    "plain PyTorch": (way.theirs, 1.0),
                    "a copy": (lambda s=source, t=target: t.copy_(s), 0.8),  # type: ignore[misc]
                }
                for other, (call, bar) in others.items():
                    raced = turns(way.ours, call, rounds=rounds, calls=calls, device=device)
                    cells = raced.cells(lambda seconds: 1e3 * seconds, ".3f")
                    record.row(
                        "experts' rows in bfloat16, ms",
                        rows=f"{way.name}, {T} x {D}, {C} of {E}",
                        against=other,
                        **cells,
                        bar=bar,
                        ok=None if settings.smoke else raced.ratio >= bar,
                    )

    for T, E, *choice in TINY_CHOICES if settings.smoke else CHOICES:
        with record.attempt(f"choice of experts, {T} x {E}, {choice}"):
            scores, bias = torch.rand(T, E, device=device), torch.rand(E, device=device)
            compiled = torch.compile(plain, disable=settings.smoke)
            raced = turns(
                lambda s=scores, b=bias, c=choice: choose_experts(s, b, *c),  # type: ignore[misc]
                lambda s=scores, b=bias, c=choice, p=compiled: p(s, b, *c),  # type: ignore[misc]
                rounds=rounds,
                calls=calls,
                device=device,
            )
            record.row(
                "a router's choice of experts, beside torch's compiled, ms",
                scores=f"{T} x {E}",
                chosen=f"{choice[0]} of {choice[1]} groups, {choice[2]} of them",
                **raced.cells(lambda seconds: 1e3 * seconds, ".3f"),
            )


def ways(device: str, T: int, D: int, C: int, E: int) -> Iterator[Way]:
    """Yield permutation and weighted sum, forward, and backward alone."""
    order, _ = sort_by_expert(torch.rand(T, E, device=device).topk(C).indices, E)
    back = invert_permutation(order)
    x, outputs = (torch.randn(n, D, device=device, dtype=torch.bfloat16).requires_grad_() for n in (T, T * C))
    weights = torch.rand(T, C, device=device).requires_grad_()
    row = 2 * T * D

    def calls(function: Callable[[], torch.Tensor], of: tuple[torch.Tensor, ...]) -> tuple[Call, Call]:
        y = function()
        d_y = torch.randn_like(y)
        return function, lambda: torch.autograd.grad(y, of, d_y, retain_graph=True)

    pairs = [
        calls(lambda f=f: f(x, order, back, C), (x,))  # type: ignore[misc]
        for f in (permute, TORCH_OPS.permute)
    ]
    yield Way("permute", pairs[0][0], pairs[1][0], row * (C + 1))
    yield Way("permute, backward", pairs[0][1], pairs[1][1], row * (C + 1))
    pairs = [
        calls(lambda f=f: f(outputs, order, back, weights), (outputs, weights))  # type: ignore[misc]
        for f in (unpermute, TORCH_OPS.unpermute)
    ]
    yield Way("unpermute", pairs[0][0], pairs[1][0], row * (C + 1))
    yield Way("unpermute, backward", pairs[0][1], pairs[1][1], row * (2 * C + 1))
