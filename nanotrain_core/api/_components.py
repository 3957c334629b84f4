"""Components and commands of a plugin, their registry, and errors."""

from nanotrain_core import __version__, hookimpl
from nanotrain_core.command import Command
from nanotrain_core.compile.eager import KeptEager, kept_eager
from nanotrain_core.component import Component, NotCaptured, StaysEager, Support, always_captured
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
    UnfitCheckpoint,
    did_you_mean,
    did_you_mean_path,
)
from nanotrain_core.hookspecs import Register, RegisterCommand
from nanotrain_core.moe.rules import experts_captured
from nanotrain_core.recipe.component_functions import gpu_refusals
from nanotrain_core.registry.discovery import PluginArguments
from nanotrain_core.registry.registry import Registry, load_plugins

__all__ = [
    "CheckpointError",
    "Command",
    "Component",
    "Corrupted",
    "DataError",
    "Diverged",
    "Exit",
    "KeptEager",
    "NanotrainError",
    "NotCaptured",
    "PluginArguments",
    "PluginError",
    "Problem",
    "RecipeError",
    "Register",
    "RegisterCommand",
    "Registry",
    "StaysEager",
    "Support",
    "UnfitCheckpoint",
    "__version__",
    "always_captured",
    "did_you_mean",
    "did_you_mean_path",
    "experts_captured",
    "gpu_refusals",
    "hookimpl",
    "kept_eager",
    "load_plugins",
]
