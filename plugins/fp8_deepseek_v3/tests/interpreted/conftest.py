"""Kernels in Triton's interpreter, on a CPU: ``TRITON_INTERPRET=1 pytest`` on this folder; nothing without.

The variable must be set before Triton is first imported, and would change every other test, so
``test_triton.py`` runs this folder in a process of its own.

Three things that the interpreter of Triton 3.7 does are not what a GPU does, and are put right here: it
rounds to eight bits and to bfloat16 wrongly (ties away from zero, carries lost, NaN made a number), it
rounds ``fma`` twice, and it reads NaN of E4M3 as 480.
"""

import os
import sys
from pathlib import Path

import numpy as np
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["*"]
else:
    sys.path.insert(0, str(Path(__file__).parents[1]))  # what other tests of this plugin compare with

    import triton.language as tl
    from triton.runtime import interpreter

    DTYPES = {
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
        tl.bfloat16: torch.bfloat16,
        tl.float16: torch.float16,
        tl.float32: torch.float32,
    }
    BITS = {1: (np.uint8, torch.uint8), 2: (np.uint16, torch.int16), 4: (np.uint32, torch.int32)}

    def convert(numbers, of, to, rounding):
        """Return the bits of numbers converted as torch does, to nearest even."""
        of, to = DTYPES[of], DTYPES[to]
        _, signed = BITS[of.itemsize]
        own = np.ascontiguousarray(numbers).view(f"{'u' if of.itemsize == 1 else ''}int{8 * of.itemsize}")
        found = torch.from_numpy(own.copy()).view(signed).view(of).float().to(to)
        unsigned, signed = BITS[to.itemsize]
        return found.view(signed).numpy().view(unsigned).reshape(numbers.shape)

    def fma(builder, x, y, z):
        """Round once: the product of two float32 is exact in float64, and the sum is rounded to odd there."""
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

    np.seterr(all="ignore")  # overflow, and NaN, are what some of the tests are about
    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_fma = fma
