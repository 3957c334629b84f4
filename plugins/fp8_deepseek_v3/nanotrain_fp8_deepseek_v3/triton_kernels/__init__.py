"""Rounding to tiles, and grouped GEMMs of experts, as Triton kernels.

Codes and scales are bitwise equal to those of :mod:`~nanotrain_fp8_deepseek_v3.formats`. Imported only if
Triton is installed. Each kernel reads its operand once; its output is padded with zeros, so that no product
needs bounds checks along the reduction dimension.

Shapes: R rows, C columns, in tiles of 128; M rows, K inputs, N outputs; for stacked weights E.
"""
