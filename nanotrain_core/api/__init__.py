"""The names a plugin may import without importing torch: components, configs, checks, roles.

Files of the core may move; these names stay. Names that need torch are in :mod:`nanotrain_core.api.torch`.
"""

from nanotrain_core import __version__, hookimpl
from nanotrain_core.builtin.configs import AdamWConfig, SimpleCheckpointConfig
from nanotrain_core.builtin.transformer_config import TransformerConfig, check_transformer, yarn_magnitude
from nanotrain_core.checkpoint.box_cover import uncovered
from nanotrain_core.checkpoint.info import DTYPE_BYTES, DTYPE_NAMES, CheckpointInfo, unexpected_kinds
from nanotrain_core.checkpoint.quarantine import quarantine_checkpoint, set_checkpoints_aside
from nanotrain_core.checkpoint.run_state import (
    is_of_a_run,
    load_json,
    newest_evaluated,
    state_problems,
    streams_problem,
)
from nanotrain_core.checkpoint.simple_listing import list_checkpoints as list_simple_checkpoints
from nanotrain_core.checkpoint.tensor_boxes import Shape, index_of
from nanotrain_core.cli.argument_types import positive_int, real_number, unsigned_int, whole_number
from nanotrain_core.cli.common import (
    PIPED_WIDTH,
    add_plugin_options,
    add_recipe_options,
    find_checkpoint,
    find_checkpoints,
    plugin_arguments,
    resolve,
)
from nanotrain_core.cli.drawing import draw as draw_timeline
from nanotrain_core.cli.machines import fewest_machines
from nanotrain_core.cli.planned import plan_recipe
from nanotrain_core.command import Command
from nanotrain_core.compile.eager import KeptEager, kept_eager
from nanotrain_core.component import Component, NotCaptured, StaysEager, Support, always_captured
from nanotrain_core.data.survey import Survey
from nanotrain_core.deprecated import attribute_of
from nanotrain_core.errors import (
    CheckpointError,
    Corrupted,
    DataError,
    Diverged,
    Exit,
    NanotrainError,
    PluginError,
    Problem,
    RecipeError,
    did_you_mean,
    nearby,
)
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
from nanotrain_core.hookspecs import Register, RegisterCommand
from nanotrain_core.launch.check_inputs import input_problems, surveys
from nanotrain_core.layout.layout import Layout, Span, View, above_one
from nanotrain_core.layout.roles import (
    Role,
    Tag,
    added_by,
    main_layers,
    natural_sort_key,
    replace,
    share_tokens,
    tag,
    tagged,
    take_over,
)
from nanotrain_core.metrics.core import CORE as CORE_METRICS
from nanotrain_core.metrics.declared import Bins, Metric, Rule, Verdict, of_ranks
from nanotrain_core.metrics.declared import Names as MetricNames
from nanotrain_core.metrics.history import Curve, History, Seam, read_metrics
from nanotrain_core.metrics.patience import PATIENCE, StepKind, is_judged, must_last, step_kind
from nanotrain_core.metrics.usual_value import USUAL_KNOWN, Usual, is_relative
from nanotrain_core.moe.rules import divisible_experts, experts_captured
from nanotrain_core.optim.moment_groups import check_moments
from nanotrain_core.phases.timeline import PhaseTimeline
from nanotrain_core.phases.timeline import Stretch as PhaseStretch
from nanotrain_core.pipeline.actions import Action, Costs, Part, parts_between
from nanotrain_core.pipeline.simulator import Durations, TimedAction, Timeline, needs, simulate
from nanotrain_core.recipe.divisibility import (
    Divisible,
    divisibility_of,
    divisors_near,
    either,
    multiples_near,
    too_few,
    undivided,
)
from nanotrain_core.recipe.load import Resolution, resolve_recipe
from nanotrain_core.recipe.model_config import CachedToken, ModelConfig, cached_token_of
from nanotrain_core.recipe.phase import CHANGES
from nanotrain_core.recipe.range_validator import LARGEST_SIZE, MOST_LAYERS, Range
from nanotrain_core.recipe.secrets import has_password, is_secret, without_secrets
from nanotrain_core.recipe.settings import flat_settings, run_settings
from nanotrain_core.recipe.source import Source as TomlSource
from nanotrain_core.recipe.source import file_source as read_toml
from nanotrain_core.recipe.source import is_recipe, shipped_recipes
from nanotrain_core.recipe.tree import COMPUTES, TRAINING, OptimizerConfig, Recipe, Selection, path_field
from nanotrain_core.recipe.validate import check_combination, find_problems, microbatches_of
from nanotrain_core.registry.discovery import PluginArguments
from nanotrain_core.registry.registry import Registry, load_plugins
from nanotrain_core.run.files import (
    append_line,
    flush,
    obstacle_to_writing,
    remove_leftovers,
    write_atomically,
    write_text_atomically,
)
from nanotrain_core.run.folder_owner import running
from nanotrain_core.run.host_memory import HostMemory, host_memory
from nanotrain_core.run.host_processors import allowed_processors, cpu_quota, usable_processors
from nanotrain_core.run.plain_json import json_text
from nanotrain_core.run.progress_bar import show_progress
from nanotrain_core.run.suggest_run import RUN_FILES, is_run, nearby_run
from nanotrain_core.run.throughput import peak_flops

__all__ = [
    "CHANGES",
    "COMPUTES",
    "CORE_METRICS",
    "DTYPE_BYTES",
    "DTYPE_NAMES",
    "LARGEST_SIZE",
    "MOST_LAYERS",
    "PATIENCE",
    "PIPED_WIDTH",
    "RUN_FILES",
    "TRAINING",
    "USUAL_KNOWN",
    "Action",
    "AdamWConfig",
    "Bins",
    "CachedToken",
    "CheckpointError",
    "CheckpointInfo",
    "Command",
    "Component",
    "Corrupted",
    "Costs",
    "Curve",
    "DataError",
    "Diverged",
    "Divisible",
    "Durations",
    "Exit",
    "HFError",
    "HFMapping",
    "HFTensor",
    "History",
    "HostMemory",
    "KeptEager",
    "Layout",
    "Metric",
    "MetricNames",
    "ModelConfig",
    "NanotrainError",
    "NotCaptured",
    "OptimizerConfig",
    "ParameterMapping",
    "Part",
    "PhaseStretch",
    "PhaseTimeline",
    "PluginArguments",
    "PluginError",
    "Problem",
    "Range",
    "Recipe",
    "RecipeError",
    "Register",
    "RegisterCommand",
    "Registry",
    "Resolution",
    "Role",
    "Rule",
    "Seam",
    "Selection",
    "Shape",
    "SimpleCheckpointConfig",
    "Span",
    "StaysEager",
    "StepKind",
    "Support",
    "Survey",
    "Tag",
    "TimedAction",
    "Timeline",
    "TomlSource",
    "TransformerConfig",
    "TransformerNames",
    "Usual",
    "Verdict",
    "View",
    "__version__",
    "above_one",
    "add_plugin_options",
    "add_recipe_options",
    "added_by",
    "allowed_processors",
    "always_captured",
    "append_line",
    "cached_token_of",
    "check_combination",
    "check_moments",
    "check_transformer",
    "cpu_quota",
    "did_you_mean",
    "divisibility_of",
    "divisible_experts",
    "divisors_near",
    "draw_timeline",
    "either",
    "expect",
    "expect_flag",
    "expect_number",
    "expect_real",
    "expect_size",
    "experts_captured",
    "fewest_machines",
    "find_checkpoint",
    "find_checkpoints",
    "find_problems",
    "flat_settings",
    "flush",
    "has_password",
    "hookimpl",
    "host_memory",
    "index_of",
    "input_problems",
    "is_judged",
    "is_of_a_run",
    "is_recipe",
    "is_relative",
    "is_run",
    "is_secret",
    "json_text",
    "kept_eager",
    "list_simple_checkpoints",
    "load_json",
    "load_plugins",
    "main_layers",
    "microbatches_of",
    "multiples_near",
    "must_last",
    "natural_sort_key",
    "nearby",
    "nearby_run",
    "needs",
    "newest_evaluated",
    "obstacle_to_writing",
    "of_ranks",
    "parts_between",
    "path_field",
    "peak_flops",
    "plan_recipe",
    "plugin_arguments",
    "positive_int",
    "quarantine_checkpoint",
    "read_metrics",
    "read_rope",
    "read_toml",
    "real_number",
    "remove_leftovers",
    "replace",
    "resolve",
    "resolve_recipe",
    "run_settings",
    "running",
    "set_checkpoints_aside",
    "share_tokens",
    "shipped_recipes",
    "show_progress",
    "simulate",
    "state_problems",
    "step_kind",
    "streams_problem",
    "surveys",
    "tag",
    "tagged",
    "take_over",
    "too_few",
    "uncovered",
    "undivided",
    "unexpected_kinds",
    "unsigned_int",
    "usable_processors",
    "whole_number",
    "without_secrets",
    "write_atomically",
    "write_rope",
    "write_text_atomically",
    "yarn_magnitude",
]

__getattr__ = attribute_of(__name__)
