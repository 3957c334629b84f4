"""What multiplies each family of recipes on tensor cores, and in a plan; see ``graphed`` for emulations."""

from __future__ import annotations

from collections.abc import Callable

from nanotrain_fp8_deepseek_v3.dry import DryFP8, DryMX
from nanotrain_fp8_deepseek_v3.gemm import FP8Recipe
from nanotrain_fp8_deepseek_v3.mx import MXRecipe
from nanotrain_fp8_deepseek_v3.nvfp4.dry import DryNVFP4
from nanotrain_fp8_deepseek_v3.nvfp4.gemm import NVFP4Recipe
from nanotrain_fp8_deepseek_v3.nvfp4.scaled import ScaledNVFP4
from nanotrain_fp8_deepseek_v3.recipe import LowBitGEMM, Recipe
from nanotrain_fp8_deepseek_v3.scaled import ScaledFP8
from nanotrain_fp8_deepseek_v3.scaled_mx import ScaledMX

#: Backends by the class of the recipe. They take a recipe of it, and a run's cache.
Family = dict[type[Recipe], Callable[..., LowBitGEMM]]

#: torch's scaled GEMMs on tensor cores.
SCALED: Family = {FP8Recipe: ScaledFP8, MXRecipe: ScaledMX, NVFP4Recipe: ScaledNVFP4}
#: GEMMs without values.
DRY: Family = {FP8Recipe: DryFP8, MXRecipe: DryMX, NVFP4Recipe: DryNVFP4}
