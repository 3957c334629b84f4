"""What safetensors calls dtypes, and their size. Torch-free.

Source: https://github.com/huggingface/safetensors, ``safetensors/src/tensor.rs``, ``Dtype``.
"""

#: Code -> bytes of one number.
BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}

#: Code -> name of torch's dtype.
TORCH = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}

#: ``str(dtype)`` of torch -> code.
CODES = {f"torch.{name}": code for code, name in TORCH.items()}
