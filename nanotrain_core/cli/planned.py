"""Plans a recipe with an installed planning command, if there is one, in another process.

This is how a command of one plugin calls that of another, because plugins do not import each other.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import attrs

from nanotrain_core.registry.registry import Registry


@attrs.define(frozen=True)
class Planned:
    """The result of the planning command."""

    command: str
    """Its name."""
    code: int | None
    """Its exit code; None if it was stopped at the time limit."""
    plan: dict[str, Any] | None
    """The object it printed, None if it printed none."""
    errors: str = ""
    """Its standard error, stripped."""


def planning_command(registry: Registry) -> str | None:
    """Return the name of the installed command that plans memory, None if there is none."""
    return next((name for name, command in registry.commands().items() if command.tells_memory), None)


def plan_recipe(registry: Registry, words: Sequence[str], limit: float | None = None) -> Planned | None:
    """Plan a recipe without advice: each piece of advice is another plan, and takes as long.

    Args:
        registry: its commands are searched.
        words: recipe and options, as ``nanotrain plan`` takes them.
        limit: seconds after which it is stopped.

    Returns:
        The answer, None if no command plans.
    """
    name = planning_command(registry)
    if name is None:
        return None
    command = [sys.executable, "-m", "nanotrain_core.cli", name, *words, "--json", "--no-advice"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return Planned(name, None, None)
    try:
        found = json.loads(done.stdout)
    except ValueError:
        found = None
    return Planned(name, done.returncode, found if isinstance(found, dict) else None, done.stderr.strip())
