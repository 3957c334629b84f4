"""Scripts: the engine for a model, an optimizer and loaders of your own, without a recipe.

What a script needs in addition to the engine: callbacks, their configs, and the config of an LR schedule.
"""

from nanotrain_core.builtin.configs import ConsoleConfig, GuardConfig, JsonlConfig
from nanotrain_core.monitors.console import Console
from nanotrain_core.monitors.guard import Guard
from nanotrain_core.monitors.jsonl import Jsonl
from nanotrain_core.recipe.tree import LRScheduleConfig
from nanotrain_core.script.adapt import LossSum, ScriptConfig, adapt
from nanotrain_core.script.feed import Loader

__all__ = [
    "Console",
    "ConsoleConfig",
    "Guard",
    "GuardConfig",
    "Jsonl",
    "JsonlConfig",
    "LRScheduleConfig",
    "Loader",
    "LossSum",
    "ScriptConfig",
    "adapt",
]
