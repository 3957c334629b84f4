"""Matrix products through the faster of the two libraries that PyTorch has on a CPU.

On AMD processors PyTorch computes float32 products with MKL, which leaves half of a Zen 5's vector units
idle. oneDNN, which PyTorch has for bfloat16, uses all of them: 220 instead of 97 GFLOP/s on one core. It has
more overhead per call, so small products stay with MKL. A Zen 4 has half of these units: there oneDNN is 5 to
10% faster for large products, but not if the left operand is a transposed view, as for wgrad. Apart from
shapes, the choice depends on the processor's family alone, so that ranks on equal processors round alike.

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path

import torch

from nanotrain_core.api.torch import torch_matmul

#: AMD's family number of Zen 5; multiplications from which oneDNN is faster: from Zen 5 on, and before it.
ZEN5, LARGE, LARGER = 26, 2**21, 3 * 2**23


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


def matmul_of_loss(
    left: torch.Tensor, right: torch.Tensor, total: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``left @ right``, or add it to ``total``: :func:`matmul` where that is oneDNN's."""
    if left.is_cpu and _prefers_onednn(left, left.numel() * right.shape[1]):
        return matmul(left, right, total, add=True)
    return torch_matmul(left, right, total)


def _prefers_onednn(left: torch.Tensor, multiplications: int) -> bool:
    fastest_from = onednn_is_faster_from()
    if multiplications < fastest_from or left.dtype != torch.float32:
        return False
    return fastest_from < LARGER or left.is_contiguous()


@functools.cache
def onednn_is_faster_from() -> float:
    """Return the number of multiplications from which oneDNN is faster for a float32 product.

    It is infinity on processors other than AMD's, and if this build of PyTorch has no oneDNN.
    """
    processors = Path("/proc/cpuinfo")
    text = processors.read_text(encoding="utf-8") if processors.is_file() else ""
    built_in = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not built_in or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return math.inf
    return threshold(text)


def threshold(cpuinfo: str) -> float:
    """Return :func:`onednn_is_faster_from` for the processor that the text of /proc/cpuinfo describes."""
    family = re.search(r"^cpu family\s*:\s*(\d+)", cpuinfo, re.MULTILINE)
    if "AuthenticAMD" not in cpuinfo:
        return math.inf
    return LARGE if family and int(family[1]) >= ZEN5 else LARGER
