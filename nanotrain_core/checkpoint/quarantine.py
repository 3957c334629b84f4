"""Renames checkpoints, files or folders: damaged ones, and those of an abandoned branch. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import count
from pathlib import Path


def quarantine_checkpoint(damaged: Path) -> Path:
    """Rename a damaged ``step-<number>``, so that its step can be saved again; return its new path."""
    step = damaged.stem.removeprefix("step-")
    target = _free(damaged.parent, time.strftime(f".corrupt-{step}-%Y%m%d-%H%M%S"))
    damaged.rename(target)
    return target


def set_checkpoints_aside(folder: Path, unwanted: Iterable[Path]) -> Path | None:
    """Move checkpoints into ``folder/superseded-<time>/``; return that folder, or None if there were none."""
    there = list(unwanted)
    if not there:
        return None
    aside = _free(folder, time.strftime("superseded-%Y%m%d-%H%M%S"))
    aside.mkdir()
    for old in there:
        old.rename(aside / old.name)
    return aside


def _free(folder: Path, stem: str) -> Path:
    """Return an unused path: two made within a second would replace one another."""
    names = (stem if number == 1 else f"{stem}-{number}" for number in count(1))
    return next(folder / name for name in names if not (folder / name).exists())
