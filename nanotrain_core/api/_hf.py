"""Hugging Face: parameter names, and options in `config.json`."""

from nanotrain_core.hf.mapping import (
    HFError,
    HFMapping,
    HFTensor,
    ParameterMapping,
    expect,
    expect_flag,
    expect_real,
    expect_size,
)
from nanotrain_core.hf.rope import expect_number, read_rope, write_rope
from nanotrain_core.hf.transformer_names import TransformerNames

__all__ = [
    "HFError",
    "HFMapping",
    "HFTensor",
    "ParameterMapping",
    "TransformerNames",
    "expect",
    "expect_flag",
    "expect_number",
    "expect_real",
    "expect_size",
    "read_rope",
    "write_rope",
]
