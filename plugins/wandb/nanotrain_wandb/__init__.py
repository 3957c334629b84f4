"""Weights & Biases: every metric of a run, online or offline.

The plugin's entry module: every ``nanotrain`` command imports it, so it never imports torch or wandb.
"""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import attrs

from nanotrain_core.api import Component, Layout, Problem, Range, Recipe, Register, hookimpl

__version__ = "0.1.0"


@attrs.define(frozen=True, kw_only=True)
class WandbConfig:
    """``[[monitor]] use = "wandb"``. The key of the account is wandb's business: `wandb login`."""

    project: str | None = None
    """Unset: what wandb itself takes, `WANDB_PROJECT` or "uncategorized"."""
    entity: str | None = None
    """The user or team. Unset: the account's own."""
    name: str | None = None
    """Unset: the run's name."""
    tags: tuple[str, ...] = ()
    """Words to find it by."""
    group: str | None = None
    """What it is shown with, as the runs of a sweep."""
    mode: Literal["auto", "online", "offline"] = "auto"
    """`offline` writes files for `wandb sync`; `auto` is `WANDB_MODE`, or online."""
    metrics: tuple[str, ...] = ("*",)
    """Which metrics, each a name or a pattern: `"validation/*"`."""
    histograms: bool = True
    """Whether histograms are sent, too."""
    finish_seconds: float = attrs.field(default=60.0, validator=Range(0.0, 86400.0))
    """How long the end of the run waits for what is not yet sent."""


def check_installed(recipe: Recipe, config: WandbConfig, layout: Layout) -> Iterator[Problem]:
    """Refuse a run that could tell nothing, before it begins."""
    try:
        version("wandb")  # a folder of that name, as wandb itself makes one, would pass for the module
    except PackageNotFoundError:
        number = next(n for n, each in enumerate(recipe.monitor) if each.config is config)
        yield Problem(f"monitor.{number}.use", "'wandb' needs the package wandb: pip install wandb")


@hookimpl
def nanotrain_register_monitor(register: Register) -> None:
    """Register ``wandb``."""
    register(
        Component(
            name="wandb",
            config=WandbConfig,
            factory="nanotrain_wandb.client:Wandb",
            summary="every metric to Weights & Biases, online or offline",
            provides={"records_metrics"},
            check=check_installed,
        )
    )
