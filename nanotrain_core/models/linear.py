"""Matrix products through the faster of the two libraries that PyTorch has on a CPU.

On AMD processors PyTorch's float32 products run in MKL, which leaves half of a Zen 5's vector units idle,
while oneDNN, there for bfloat16, uses them all: 220 GFLOP/s against 97 on one core. A Zen 4 has half of
these units, and oneDNN is ahead by a tenth, in large products alone. It starts more slowly, so that small
ones are not made there.

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from nanotrain_core.pipeline.weight_gradients import Place, in_use, take_place, weight_gradient

#: Multiplications from which oneDNN is faster, by the family of an AMD processor: from Zen 5 on, and before.
ZEN5, LARGE, LARGER = 26, 2**21, 3 * 2**23


class Linear(nn.Linear):
    """``nn.Linear`` whose three products are :func:`matmul`, the one for the weight when there is time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., K] times the transposed weight [N, K], plus the bias [N] if there is one."""
        rows, place = x.numel() // max(1, x.shape[-1]), take_place(self)
        if place is None and not in_use() and not _prefers_onednn(x, rows * self.weight.numel()):
            return F.linear(x, self.weight, self.bias)
        handle = None if place is None else place.handle
        y: torch.Tensor = _Linear.apply(x, self.weight, place, handle)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight_NK: torch.Tensor, place: Place | None, handle: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.place, ctx.shape = place, x.shape
        again = place and place.again
        ctx.save_for_backward(again[0] if again else x, weight_NK)
        rows_MK = x.reshape(-1, x.shape[-1])
        return matmul(rows_MK, weight_NK.T).view(*x.shape[:-1], len(weight_NK))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kept, weight_NK = ctx.saved_tensors
        width = ctx.shape[-1]
        again = ctx.needs_input_grad[1] and ctx.place and ctx.place.again
        x = again[1](kept) if again else lambda: kept
        d_y_MN, d_x, d_weight_NK = d_y.reshape(-1, d_y.shape[-1]), None, None
        if ctx.needs_input_grad[0]:
            d_x = matmul(d_y_MN, weight_NK).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            d_weight_NK = weight_gradient(
                weight_NK, lambda: matmul(d_y_MN.T, x().reshape(-1, width)), ctx.place
            )
        return d_x, d_weight_NK, None, None


def matmul(
    a_MK: torch.Tensor, b_KN: torch.Tensor, out_MN: torch.Tensor | None = None, *, add: bool = False
) -> torch.Tensor:
    """Return ``a_MK @ b_KN``; either may be a transposed view. Not differentiable.

    Args:
        a_MK: left.
        b_KN: right.
        out_MN: where to write the product.
        add: add it to what ``out_MN`` holds.
    """
    if _prefers_onednn(a_MK, a_MK.numel() * b_KN.shape[1]):
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(a_MK, b_KN.T, None, "none", [], "")
        if out_MN is None:
            return y
        return out_MN.add_(y) if add else out_MN.copy_(y)
    if out_MN is None:
        return a_MK @ b_KN
    return out_MN.addmm_(a_MK, b_KN) if add else torch.mm(a_MK, b_KN, out=out_MN)


def _prefers_onednn(x: torch.Tensor, multiplications: int) -> bool:
    return (
        multiplications >= onednn_is_faster_from()  # known already: before what has to be asked each time
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
    )


@functools.cache
def onednn_is_faster_from() -> float:
    """Return the multiplications of a product from which oneDNN is faster; infinity where it never is.

    That is where this processor is none that MKL neglects, or this build of PyTorch has no oneDNN.
    """
    processors = Path("/proc/cpuinfo")
    said = processors.read_text(encoding="utf-8") if processors.is_file() else ""
    family = re.search(r"^cpu family\s*:\s*(\d+)", said, re.MULTILINE)
    built_in = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if "AuthenticAMD" not in said or not built_in or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return math.inf
    return LARGE if family and int(family[1]) >= ZEN5 else LARGER
