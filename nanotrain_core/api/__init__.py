"""What a plugin may import without importing torch: components, configs, checks, names of roles.

Files of the core may move; these names stay. What needs torch is in :mod:`nanotrain_core.api.torch`.
"""

from nanotrain_core import __version__, hookimpl
from nanotrain_core.builtin.configs import AdamWConfig, yarn_magnitude
from nanotrain_core.checkpoint.box_cover import uncovered
from nanotrain_core.checkpoint.info import DTYPE_BYTES, DTYPE_NAMES, CheckpointInfo, strange_kinds
from nanotrain_core.checkpoint.tensor_boxes import Shape
from nanotrain_core.component import Component, StaysEager, Support
from nanotrain_core.data.survey import Survey
from nanotrain_core.errors import (
    CheckpointError,
    DataError,
    Diverged,
    NanotrainError,
    PluginError,
    Problem,
    did_you_mean,
)
from nanotrain_core.hf.mapping import HFError, HFMapping, HFTensor, ParameterMapping, expect, expect_size
from nanotrain_core.hf.rope import expect_number, read_rope, write_rope
from nanotrain_core.hookspecs import Register
from nanotrain_core.layout.layout import Layout, Span, View, above_one
from nanotrain_core.layout.roles import Role, Tag, replace, share_tokens, tag, tagged, take_over
from nanotrain_core.metrics.declared import Bins, Metric, Rule
from nanotrain_core.optim.moment_groups import check_moments
from nanotrain_core.pipeline.actions import Action, Costs, Part, parts_between
from nanotrain_core.recipe.divisibility import (
    Divisible,
    divisibility_of,
    divisors_near,
    either,
    multiples_near,
    too_few,
    undivided,
)
from nanotrain_core.recipe.tree import TRAINING, OptimizerConfig, Recipe, Selection, path_field
from nanotrain_core.run.files import flush, remove_leftovers, write_text_atomically

__all__ = [
    "DTYPE_BYTES",
    "DTYPE_NAMES",
    "TRAINING",
    "Action",
    "AdamWConfig",
    "Bins",
    "CheckpointError",
    "CheckpointInfo",
    "Component",
    "Costs",
    "DataError",
    "Diverged",
    "Divisible",
    "HFError",
    "HFMapping",
    "HFTensor",
    "Layout",
    "Metric",
    "NanotrainError",
    "OptimizerConfig",
    "ParameterMapping",
    "Part",
    "PluginError",
    "Problem",
    "Recipe",
    "Register",
    "Role",
    "Rule",
    "Selection",
    "Shape",
    "Span",
    "StaysEager",
    "Support",
    "Survey",
    "Tag",
    "View",
    "__version__",
    "above_one",
    "check_moments",
    "did_you_mean",
    "divisibility_of",
    "divisors_near",
    "either",
    "expect",
    "expect_number",
    "expect_size",
    "flush",
    "hookimpl",
    "multiples_near",
    "parts_between",
    "path_field",
    "read_rope",
    "remove_leftovers",
    "replace",
    "share_tokens",
    "strange_kinds",
    "tag",
    "tagged",
    "take_over",
    "too_few",
    "uncovered",
    "undivided",
    "write_rope",
    "write_text_atomically",
    "yarn_magnitude",
]
