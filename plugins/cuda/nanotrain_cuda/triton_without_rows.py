"""The kernel of :mod:`~nanotrain_cuda.without_rows`. Imported only where Triton is."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Numbers that a program writes at a time, and programs for each expert at most: they wait for one load.
BLOCK, PROGRAMS = 4096, 32


@triton.jit  # type: ignore[untyped-decorator]
def zero_if_no_rows(  # type: ignore[no-untyped-def]
    stacked_ptr, counts_ptr, stride, size, STEPS: tl.constexpr, BLOCK: tl.constexpr
):
    """Write zeros to an expert's matrix, if it has no rows."""
    e, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    if tl.load(counts_ptr + e) == 0:
        zeros = tl.zeros((BLOCK,), stacked_ptr.dtype.element_ty)
        for step in range(STEPS):
            at = (part * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
            tl.store(stacked_ptr + e * stride + at, zeros, mask=at < size)


def zero_without_rows(stacked_ENK: torch.Tensor, counts_E: torch.Tensor) -> None:
    """Set matrices to zero whose count of rows is 0; each is one block of memory."""
    E, N, K = stacked_ENK.shape
    steps = triton.cdiv(N * K, PROGRAMS * BLOCK)
    programs = triton.cdiv(N * K, steps * BLOCK) if steps else 0
    if E * programs:
        zero_if_no_rows[(E, programs)](
            stacked_ENK, counts_E, stacked_ENK.stride(0), N * K, STEPS=steps, BLOCK=BLOCK, num_warps=8
        )
