"""TensorBoard: every metric of a run as scalars, histograms and texts.

The plugin's entry module: every ``nanotrain`` command imports it, so it never imports torch.
"""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import attrs

from nanotrain_core.api import Component, Layout, Problem, Range, Recipe, Register, hookimpl, path_field

__version__ = "0.1.0"


@attrs.define(frozen=True, kw_only=True)
class TensorBoardConfig:
    """``[[monitor]] use = "tensorboard"``."""

    folder: str | None = path_field(default=None)
    """Where event files go. Unset: `tensorboard` in the run folder."""
    metrics: tuple[str, ...] = ("*",)
    """Which metrics, each a name or a pattern: `"validation/*"`."""
    histograms: bool = True
    """Whether histograms are written, too."""
    flush_seconds: float = attrs.field(default=10.0, validator=Range(1.0, 86400.0))
    """Between writes to the disk."""


def check(recipe: Recipe, config: TensorBoardConfig, layout: Layout) -> Iterator[Problem]:
    """Refuse a run that could not write, before it begins."""
    number = next(n for n, each in enumerate(recipe.monitor) if each.config is config)
    if config.folder and Path(config.folder).is_file():
        yield Problem(f"monitor.{number}.folder", f"{config.folder} is a file; expected a folder")
    try:
        version("tensorboard")
    except PackageNotFoundError:
        yield Problem(
            f"monitor.{number}.use", "'tensorboard' needs the package tensorboard: pip install tensorboard"
        )


@hookimpl
def nanotrain_register_monitor(register: Register) -> None:
    """Register ``tensorboard``."""
    register(
        Component(
            name="tensorboard",
            config=TensorBoardConfig,
            factory="nanotrain_tensorboard.events:TensorBoard",
            summary="scalars, histograms and texts for TensorBoard, in the run folder",
            provides={"records_metrics"},
            check=check,
        )
    )
