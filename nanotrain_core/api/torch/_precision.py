"""Precision: dtypes, GEMM backends, quantized storage, master weights and loss scales."""

from nanotrain_core.precision.dequantizing_gemm import DequantizingGEMM
from nanotrain_core.precision.dtypes import cast, keep_dtype
from nanotrain_core.precision.gemm import (
    LINEAR_ROLES,
    GEMMBackend,
    SavedTensors,
    gemm_parameters,
    gemms_of,
    use_gemm,
)
from nanotrain_core.precision.gemm_backend import (
    Prepared,
    PreparesWeights,
    QuantizedActivations,
    QuantizedInput,
    TorchGEMM,
)
from nanotrain_core.precision.loss_scale import DynamicLossScale, NoLossScale
from nanotrain_core.precision.quantized_storage import (
    PackedWeight,
    Packing,
    dequantize,
    memory_like,
    move_into,
    range_of,
    read_range,
    requantize,
    storage_key,
    storage_of,
    unquantized,
    write_range,
)
from nanotrain_core.precision.quantized_swiglu import quantize_swiglu
from nanotrain_core.precision.uniform import Float32Master, LiveMaster, Uniform
from nanotrain_core.precision.wgrad_point import RecomputedInput, WgradPoint

__all__ = [
    "LINEAR_ROLES",
    "DequantizingGEMM",
    "DynamicLossScale",
    "Float32Master",
    "GEMMBackend",
    "LiveMaster",
    "NoLossScale",
    "PackedWeight",
    "Packing",
    "Prepared",
    "PreparesWeights",
    "QuantizedActivations",
    "QuantizedInput",
    "RecomputedInput",
    "SavedTensors",
    "TorchGEMM",
    "Uniform",
    "WgradPoint",
    "cast",
    "dequantize",
    "gemm_parameters",
    "gemms_of",
    "keep_dtype",
    "memory_like",
    "move_into",
    "quantize_swiglu",
    "range_of",
    "read_range",
    "requantize",
    "storage_key",
    "storage_of",
    "unquantized",
    "use_gemm",
    "write_range",
]
