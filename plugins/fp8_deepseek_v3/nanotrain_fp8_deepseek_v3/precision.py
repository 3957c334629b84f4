"""The precisions: bfloat16 weights and activations, float32 masters and gradients, narrower GEMMs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch
from torch import nn

from nanotrain_core.api import Role, Tag, tagged
from nanotrain_core.api.torch import (
    GEMMBackend,
    Mesh,
    NoLossScale,
    Passes,
    Uniform,
    gemm_parameters,
    quantize_swiglu,
    use_dispatch_codec,
    use_gemm,
)
from nanotrain_fp8_deepseek_v3.backends import choose
from nanotrain_fp8_deepseek_v3.configs import FP8DeepSeekV3Config, ModuleFormats, MXFP8Config, NVFP4Config
from nanotrain_fp8_deepseek_v3.formats import E4M3, E5M2, TILE, dequantize, quantize
from nanotrain_fp8_deepseek_v3.gemm import FP8Recipe
from nanotrain_fp8_deepseek_v3.graphed import GraphedFloat32
from nanotrain_fp8_deepseek_v3.mx import MXRecipe
from nanotrain_fp8_deepseek_v3.nvfp4.gemm import NVFP4Recipe
from nanotrain_fp8_deepseek_v3.operand_cache import OperandCache
from nanotrain_fp8_deepseek_v3.policy import Row, check_patterns, format_and_why, matches, rows_of, table
from nanotrain_fp8_deepseek_v3.recipe import Recipe

#: Creates a backend of a run.
Make = Callable[[Recipe, OperandCache], GEMMBackend]


class ByModule(Uniform):
    """bfloat16, except the GEMMs of linear layers, whose formats follow the recipe's patterns.

    There is no loss scale: scales of tiles replace it.
    """

    def __init__(self, config: ModuleFormats) -> None:
        super().__init__(torch.bfloat16, NoLossScale())
        self.config = config
        self.passes, self.cache = Passes(), OperandCache()
        self.lines: list[str] = []

    def setup(self, seed: int, passes: Passes, gemm: GEMMBackend) -> None:
        """Bind the lifetime of weights' prepared forms to the run's passes."""
        self.passes, self.cache = passes, OperandCache(passes)

    def recipe(self, name: str, tag: Tag, parameter: str) -> Recipe:
        """Return the rounding of the operands around one parameter."""
        raise NotImplementedError

    def check_parts(self, parts: Sequence[nn.Module], mesh: Mesh) -> None:
        """Give every linear layer its backend. Gathers the table of all stages over pp.

        Raises:
            NanotrainError: a pattern matches nothing, or the backend cannot run on this device.
        """
        own = [row for part in parts for row in rows_of(part, self.config)]
        stages = mesh.gather(own, "pp") if "pp" in mesh.layout.dims else [own]
        rows: list[Row] = sorted({row for stage in stages for row in stage}, key=lambda row: row.name)
        check_patterns(rows, self.config)
        backend = choose(self.config.backend, mesh.device, self.recipe("", Tag(Role.COLUMN), "weight"))
        for part in parts:
            for name, module, tag in tagged(part):
                backends = self._backends(name, module, tag, backend.make)
                if backends:
                    use_gemm(module, backends, self.passes)
            quantize_swiglu(part)
        self.lines = table(attrs.evolve(row, format=self._label(row, backend.name)) for row in rows)

    def _backends(self, name: str, module: nn.Module, tag: Tag, make: Make) -> dict[str, GEMMBackend]:
        """Return the backends of a module's parameters; those with the same rounding share one object."""
        wanted = gemm_parameters(module)
        format_, _ = format_and_why(name, module, self.config) if wanted else ("bf16", "")
        if format_ == "fp32":
            return dict.fromkeys(wanted, GraphedFloat32(self.cache))
        if format_ == "bf16":
            return {}
        recipes = {parameter: self.recipe(name, tag, parameter) for parameter in wanted}
        made = {recipe: make(recipe, self.cache) for recipe in set(recipes.values())}
        return {parameter: made[recipe] for parameter, recipe in recipes.items()}

    def _label(self, row: Row, backend: str) -> str:
        return f"{row.format} {backend}" if row.format == self.config.LOW else row.format

    def describe(self) -> list[str]:
        """Return the format of every module of the whole model."""
        return ["GEMM format of each module:", *self.lines]


class FP8DeepSeekV3(ByModule):
    """E4M3 in tiles of 1 x 128 and blocks of 128 x 128."""

    config: FP8DeepSeekV3Config

    def convert(self, part: nn.Module) -> nn.Module:
        """Cast to bfloat16, and install the codec that sends rows of FP8 experts in FP8."""
        part = super().convert(part)
        for name, module, tag in tagged(part) if self.config.dispatch else ():
            if tag.role is Role.EXPERTS and gemm_parameters(module):
                format_, _ = format_and_why(name, module, self.config)
                if format_ == self.config.LOW:
                    use_dispatch_codec(module, Codec())
        return part

    def recipe(self, name: str, tag: Tag, parameter: str) -> FP8Recipe:
        """Return power-of-two scales where DeepSeek-V3 uses them, float32 scales elsewhere.

        The input of experts was dispatched in them, and so were the gradients of their outputs.
        """
        recipe = FP8Recipe(quantize_swiglu=self.config.swiglu)
        if tag.role is not Role.EXPERTS:
            return attrs.evolve(recipe, input_power_of_two=matches(name, self.config.power_of_two))
        reads_input = tag.split.get(parameter) == 1
        return attrs.evolve(recipe, input_power_of_two=reads_input, gradient_power_of_two=not reads_input)


class FP8Hybrid(ByModule):
    """One scale per tensor: E4M3 for inputs and weights, E5M2, with a larger range, for gradients.

    Scales are computed from the tensor itself: with those of an earlier step a spike would overflow. Each
    expert has separate scales for its weight and its rows, and each rank for its shard.

    Source: Micikevicius et al., arXiv 2209.05433, section 3.
    """

    def recipe(self, name: str, tag: Tag, parameter: str) -> FP8Recipe:
        """Return the same rounding for every layer."""
        return FP8Recipe(tile=0, gradients=E5M2)


class MXFP8(ByModule):
    """E4M3 in blocks of 32 along what each product sums over, with scales of E8M0."""

    config: MXFP8Config

    def recipe(self, name: str, tag: Tag, parameter: str) -> MXRecipe:
        """Return the same rounding for every layer."""
        return MXRecipe(rounding=self.config.scale_rounding)


class NVFP4(ByModule):
    """E2M1 in blocks of 16 along what each product sums over, with scales of E4M3 and of the tensor."""

    config: NVFP4Config

    def recipe(self, name: str, tag: Tag, parameter: str) -> NVFP4Recipe:
        """Return the same rounding for every layer."""
        config = self.config
        return NVFP4Recipe(
            config.tensor_scale, config.weight_blocks, config.hadamard, config.stochastic_rounding
        )


class Codec:
    """Rows in flight to experts: one byte per element, and two for the exponent of each tile of a row.

    The experts round it in the same tiles with power-of-two scales, which leaves it unchanged.
    See :class:`~nanotrain_core.moe.routing.DispatchCodec`.
    """

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Return codes and scales [N, D + 2 D / 128], uint8; bfloat16 holds a power of two."""
        tiled = quantize(rows, (1, TILE), power_of_two=True)
        scales = tiled.scales.flatten(1).to(torch.bfloat16).contiguous()
        return torch.cat([tiled.codes().view(torch.uint8), scales.view(torch.uint8)], dim=1)

    def decode(self, coded: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the rows [N, D]."""
        codes = coded[:, :width].contiguous().view(torch.float8_e4m3fn)
        scales = coded[:, width:].contiguous().view(torch.bfloat16).float()
        return dequantize(codes, scales, E4M3).to(dtype)
