"""Recipes: reading, resolving and checking them, and phases."""

from nanotrain_core.data.survey import Survey
from nanotrain_core.launch.check_inputs import input_problems, surveys
from nanotrain_core.launch.check_modules import check_modules
from nanotrain_core.phases.timeline import PhaseTimeline
from nanotrain_core.phases.timeline import Stretch as PhaseStretch
from nanotrain_core.recipe.load import Resolution, resolve_recipe
from nanotrain_core.recipe.phase import CHANGEABLE
from nanotrain_core.recipe.secrets import has_password, is_secret, without_secrets
from nanotrain_core.recipe.settings import flat_settings, run_settings
from nanotrain_core.recipe.source import Source as TomlSource
from nanotrain_core.recipe.source import file_source as read_toml
from nanotrain_core.recipe.source import is_recipe, shipped_recipes
from nanotrain_core.recipe.tree import SAME_ON_RESUME, TRAINING_ONLY, Recipe, Selection
from nanotrain_core.recipe.validate import check_combination, find_problems, microbatches_of

__all__ = [
    "CHANGEABLE",
    "SAME_ON_RESUME",
    "TRAINING_ONLY",
    "PhaseStretch",
    "PhaseTimeline",
    "Recipe",
    "Resolution",
    "Selection",
    "Survey",
    "TomlSource",
    "check_combination",
    "check_modules",
    "find_problems",
    "flat_settings",
    "has_password",
    "input_problems",
    "is_recipe",
    "is_secret",
    "microbatches_of",
    "read_toml",
    "resolve_recipe",
    "run_settings",
    "shipped_recipes",
    "surveys",
    "without_secrets",
]
