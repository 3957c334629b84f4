"""NVFP4 training: the three GEMMs of a linear layer with both operands in four bits.

Each idea has a file: the format and its two-level scales (``format``), the random Hadamard transform
(``hadamard``), stochastic rounding (``rounding``), the three GEMMs and their exact emulation (``gemm``),
Blackwell's tensor cores (``scaled``), and a plan's tensors (``dry``).

Weights, their masters and gradients are those of ``bf16``: only operands of GEMMs are in four bits, and they
are rounded anew in each step. The format ``nvfp4`` of ``fp4_master`` is another use of the same numbers: it
stores master weights in them.

Source: NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv 2509.25149.
"""
