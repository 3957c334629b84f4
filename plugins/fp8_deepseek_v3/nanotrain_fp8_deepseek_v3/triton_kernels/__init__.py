"""Rounding to tiles, and grouped GEMMs of experts, as Triton kernels.

Codes and scales are those of :mod:`~nanotrain_fp8_deepseek_v3.formats`, bit for bit. Imported only where
Triton is. Each kernel reads its operand once; what it writes is filled up with zeros, so that no product has
to look where an operand ends along what is summed over.

Shapes: R rows, C columns, in tiles of 128; M rows, K inputs, N outputs; of stacked weights E.
"""
