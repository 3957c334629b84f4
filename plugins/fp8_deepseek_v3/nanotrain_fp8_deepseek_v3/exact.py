"""Matrix products that no torch switch makes less precise: used by the emulation, the reference backend.

``torch.backends.cuda.matmul.allow_tf32``, ``torch.set_float32_matmul_precision`` and autocast let torch round
the operands of a float32 product to TF32 or bfloat16. A code times its scale has up to 24 bits: it would be
rounded a second time.

- On CUDA products are computed in float64, where none of these applies. A single call cannot request
  float32. Each term is then exact, so that the sum is the definition's except for its last bits. On
  data-center GPUs (A100, H100, H200) it takes as long as float32, elsewhere up to 64 times as long.
- On a CPU, where float64 takes twice as long, they are in float32, and oneDNN is set to keep float32 during
  the product, if it is set otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

#: oneDNN's default for float32 operands: no rounding.
EXACT = ("none", "ieee")


def matmul(a_MK: torch.Tensor, b_KN: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``a_MK @ b_KN`` in the dtype of both, float32 or float64; in ``out`` if there is one."""
    if a_MK.device.type == "cuda":
        y = torch.mm(a_MK.double(), b_KN.double())
        return y.to(a_MK.dtype) if out is None else out.copy_(y)
    if torch.compiler.is_compiling():  # the compiler's settings apply in a graph
        return torch.mm(a_MK, b_KN) if out is None else out.copy_(torch.mm(a_MK, b_KN))
    with ExitStack() as switches:
        kind = a_MK.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            switches.enter_context(torch.autocast(kind, enabled=False))
        if torch.backends.mkldnn.matmul.fp32_precision not in EXACT:  # type: ignore[attr-defined]
            switches.enter_context(_float32_stays())
        return torch.mm(a_MK, b_KN) if out is None else torch.mm(a_MK, b_KN, out=out)


@contextmanager
def _float32_stays() -> Iterator[None]:
    """Make oneDNN multiply in float32 within the block, and restore its settings."""
    setting = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = setting.fp32_precision
    setting.fp32_precision = "ieee"
    try:
        yield
    finally:
        setting.fp32_precision = "none"  # it may have been unset, and inherited a general setting
        if setting.fp32_precision != before:
            setting.fp32_precision = before
