"""Scripts: the engine's other door, for a model, an optimizer and loaders of your own."""

from nanotrain_core.script.adapt import LossSum, ScriptConfig, adapt
from nanotrain_core.script.feed import Loader

__all__ = ["Loader", "LossSum", "ScriptConfig", "adapt"]
