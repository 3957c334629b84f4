"""Names the monitor that would record the metrics which a report lacks."""

from __future__ import annotations

from functools import cache

from nanotrain_core.api import load_plugins

#: Group of metrics -> its content, as a phrase.
TELLS = {
    "time": "what a step's time is spent on",
    "memory": "how full each rank is",
    "gradients": "norms layer by layer",
    "updates": "how far each layer moves in a step",
    "moe": "which experts get the tokens",
    "health": "a word on what is wrong",
}


#: Group -> a monitor of this project that has it, and what to install for it.
OURS = {
    "time": ("throughput", "nanotrain-performance"),
    "memory": ("memory", "nanotrain-performance"),
    "gradients": ("health", "nanotrain-health"),
    "updates": ("health", "nanotrain-health"),
    "moe": ("moe", "nanotrain-health"),
}


@cache
def monitors_of(group: str) -> tuple[str, ...]:
    """Return the installed monitors that declare metrics of a group."""
    registry = load_plugins()
    names = registry.names("monitor")
    return tuple(
        name for name in names if any(m.group == group for m in registry.get("monitor", name).metrics)
    )


def bring(group: str) -> str:
    """Return a sentence that names the monitor which records a group of metrics."""
    told = TELLS.get(group, f"metrics of the group '{group}'")
    names = monitors_of(group)
    if names:
        which = " or ".join(f'[[monitor]] use = "{name}"' for name in names)
        return f"To record {told}, add {which} to the recipe."
    if group not in OURS:
        return f"No monitor that is installed here records {told}: see nanotrain metrics."
    name, distribution = OURS[group]
    return f'To record {told}, install {distribution} and add [[monitor]] use = "{name}" to the recipe.'
