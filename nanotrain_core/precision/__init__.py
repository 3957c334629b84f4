"""Precision: dtypes, GEMM backends of linear layers, and quantized parameter storage."""
