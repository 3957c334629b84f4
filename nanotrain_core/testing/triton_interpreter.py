"""Triton's interpreter, corrected where it does not round as a GPU does."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def put_right() -> None:
    """Make conversions round as in torch, and ``fma`` round once, in this process.

    The interpreter of Triton 3.7 rounds to eight bits and to bfloat16 wrongly (ties away from zero, carries
    lost, NaN made a number), rounds ``fma`` twice, and reads NaN of E4M3 as 480. Call it where
    ``TRITON_INTERPRET=1`` was set before Triton was first imported.
    """
    from triton.runtime import interpreter

    np.seterr(all="ignore")  # overflow, and NaN, are what some of the tests are about
    interpreter._convert_float = _convert
    interpreter.InterpreterBuilder.create_fma = _fma


_BITS = {1: (np.uint8, torch.uint8), 2: (np.uint16, torch.int16), 4: (np.uint32, torch.int32)}


def _dtype(kind: Any) -> torch.dtype:
    import triton.language as tl

    return {
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
        tl.bfloat16: torch.bfloat16,
        tl.float16: torch.float16,
        tl.float32: torch.float32,
    }[kind]


def _convert(numbers: Any, of: Any, to: Any, rounding: Any) -> Any:
    """Return the bits of values converted as torch does, to nearest even."""
    source, target = _dtype(of), _dtype(to)
    _, signed = _BITS[source.itemsize]
    own = np.ascontiguousarray(numbers).view(f"{'u' if source.itemsize == 1 else ''}int{8 * source.itemsize}")
    found = torch.from_numpy(own.copy()).view(signed).view(source).float().to(target)
    unsigned, signed = _BITS[target.itemsize]
    return found.view(signed).numpy().view(unsigned).reshape(numbers.shape)


def _fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """Round once: the product of two float32 is exact in float64, and the sum is rounded to odd there."""
    import triton.language as tl
    from triton.runtime import interpreter

    x, y, z = (each.data.astype(np.float64) for each in (x, y, z))
    product, total = x * y, x * y + z
    # The error of the sum, exactly (Knuth); where there is one, an even last bit is made odd.
    part = total - product
    error = (product - (total - part)) + (z - part)
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    towards = np.where((error > 0) == (total > 0), 1, -1)
    odd = np.where(inexact, bits + towards, bits).view(np.float64)
    return interpreter.TensorHandle(odd.astype(np.float32), tl.float32)
