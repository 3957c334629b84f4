"""Commands: arguments, the recipe or run that they name, and output."""

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

__all__ = [
    "PIPED_WIDTH",
    "add_plugin_options",
    "add_recipe_options",
    "draw_timeline",
    "fewest_machines",
    "find_checkpoint",
    "find_checkpoints",
    "plan_recipe",
    "plugin_arguments",
    "positive_int",
    "real_number",
    "resolve",
    "unsigned_int",
    "whole_number",
]
