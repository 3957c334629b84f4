"""Recipe tables: base classes, built-in ones, ranges of fields, and divisibility."""

from nanotrain_core.builtin.configs import AdamWConfig
from nanotrain_core.builtin.transformer_config import TransformerConfig, check_transformer, yarn_magnitude
from nanotrain_core.moe.rules import divisible_experts
from nanotrain_core.optim.moment_groups import check_moments
from nanotrain_core.recipe.divisibility import (
    Divisible,
    divisibility_of,
    divisors_near,
    indivisible,
    join_with_or,
    multiples_near,
    too_few_units,
)
from nanotrain_core.recipe.model_config import CachedToken, ModelConfig, cached_token_of
from nanotrain_core.recipe.range_validator import LARGEST_SIZE, MOST_LAYERS, Range, not_empty
from nanotrain_core.recipe.tree import OptimizerConfig, path_field

__all__ = [
    "LARGEST_SIZE",
    "MOST_LAYERS",
    "AdamWConfig",
    "CachedToken",
    "Divisible",
    "ModelConfig",
    "OptimizerConfig",
    "Range",
    "TransformerConfig",
    "cached_token_of",
    "check_moments",
    "check_transformer",
    "divisibility_of",
    "divisible_experts",
    "divisors_near",
    "indivisible",
    "join_with_or",
    "multiples_near",
    "not_empty",
    "path_field",
    "too_few_units",
    "yarn_magnitude",
]
