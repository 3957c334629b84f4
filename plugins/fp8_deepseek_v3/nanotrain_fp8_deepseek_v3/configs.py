"""The keys of ``[precision]``. Without torch."""

from typing import ClassVar, Literal

import attrs

from nanotrain_core.api import Range
from nanotrain_fp8_deepseek_v3 import units
from nanotrain_fp8_deepseek_v3.units import Units

Backend = Literal["auto", "emulated", "torch", "triton", "te"]


@attrs.define(frozen=True, kw_only=True)
class ModuleFormats:
    """The GEMM format of each module, and the backend.

    Patterns are shell-style patterns of module names: ``layers.0.*``, ``*.attn.o``. If several match a
    module, the widest format wins; unmatched modules are bf16. A pattern that matches no linear layer is an
    error.
    """

    LOW: ClassVar[str]
    """The key of the patterns of the narrow format."""
    UNITS: ClassVar[Units]
    """The tensor cores that its GEMMs need."""

    bf16: tuple[str, ...] = ()
    """Linear layers and experts that stay in bfloat16."""
    fp32: tuple[str, ...] = ()
    """Those with GEMMs in float32, from bfloat16 weights."""
    min_size: int = attrs.field(default=0, validator=Range(0))
    """Layers stay in bfloat16 if N x K, outputs times inputs of the weight, is less than this, for the shard
    that a rank holds and for one expert. In small GEMMs rounding takes longer than a narrow format saves.
    0: none do."""
    backend: Backend = "auto"
    """Backend of the products in the narrow format."""


@attrs.define(frozen=True, kw_only=True)
class FP8Formats(ModuleFormats):
    """Those of FP8 beside wider ones."""

    LOW = "fp8"

    fp8: tuple[str, ...] = ("*",)
    """Linear layers and experts whose three GEMMs are in FP8. Nothing else is."""
    backend: Backend = "auto"
    """Backend of FP8 products; `auto`: `emulated` on a CPU, `triton` on a GPU. Rejected if it cannot run.
    `te`: Transformer Engine, if installed."""


@attrs.define(frozen=True, kw_only=True)
class FP8DeepSeekV3Config(FP8Formats):
    """``[precision] use = "fp8_deepseek_v3"``."""

    UNITS = units.TILES

    power_of_two: tuple[str, ...] = ("*.attn.o",)
    """FP8 layers whose inputs have power-of-two scales: those after attention. Inputs of experts and the
    gradients of their outputs always do."""
    dispatch: bool = True
    """Send rows to experts on other ranks in FP8. They are rounded there anyway: the result is the same."""
    swiglu: bool = True
    """Save the inputs of SwiGLU for the backward pass in FP8, and recompute its output."""


@attrs.define(frozen=True, kw_only=True)
class FP8HybridConfig(FP8Formats):
    """``[precision] use = "fp8_hybrid"``."""

    UNITS = units.TENSORS

    backend: Literal["auto", "emulated", "torch"] = "auto"
    """Backend of FP8 products; `auto`: `emulated` on a CPU, `torch` on a GPU of Ada, Hopper or later."""


@attrs.define(frozen=True, kw_only=True)
class MXFP8Config(FP8Formats):
    """``[precision] use = "mxfp8"``."""

    UNITS = units.MX

    scale_rounding: Literal["ceil", "floor"] = "ceil"
    """How scales are rounded to powers of two: `ceil`, up, so that no element is clipped (NVIDIA's recipe),
    or `floor`, as the OCP specification proposes, which clips elements above 448 times the scale."""
    backend: Literal["auto", "emulated", "torch"] = "auto"
    """Backend of FP8 products; `auto`: `emulated` on a CPU, `torch` on a GPU, which must be a Blackwell."""


@attrs.define(frozen=True, kw_only=True)
class NVFP4Config(ModuleFormats):
    """``[precision] use = "nvfp4"``."""

    LOW = "fp4"
    UNITS = units.NVFP4

    fp4: tuple[str, ...] = ("*",)
    """Linear layers and experts whose three GEMMs are in NVFP4. Nothing else is. NVIDIA keeps the last ones,
    15% of all, in `bf16`."""
    tensor_scale: Literal["power_of_two", "float32"] = "power_of_two"
    """The scale of a tensor: `power_of_two`, so that a block is rounded alike whatever else a rank holds of
    the tensor, or `float32`, as NVIDIA defines it."""
    weight_blocks: Literal["16x16", "1x16"] = "16x16"
    """Blocks of a weight: `16x16`, which dgrad reads as forward does, or `1x16` along what is summed over,
    which are more exact, but of two roundings."""
    hadamard: bool = True
    """Apply the random Hadamard transform to both operands of wgrad."""
    stochastic_rounding: bool = True
    """Round gradients stochastically."""
    backend: Literal["auto", "emulated", "torch"] = "auto"
    """Backend of NVFP4 products; `auto`: `emulated` on a CPU, `torch` on a GPU, which must be a Blackwell."""
