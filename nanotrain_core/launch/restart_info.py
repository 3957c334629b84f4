"""The information about a restart that monitors receive, and the files by which ranks inform a launcher."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from nanotrain_core.launch import temporary
from nanotrain_core.launch.code_digests import used_code
from nanotrain_core.recipe import Recipe, recipe_hash
from nanotrain_core.run.files import write_text_atomically
from nanotrain_core.watch.scratch import RECOVERABLE

if TYPE_CHECKING:
    from nanotrain_core.registry.registry import Registry
    from nanotrain_core.run.recovery import Restart


def restart_of(
    scratch: Path | None, failed_at: str | None, recipe: Recipe, world_size: int, registry: Registry
) -> Restart:
    """Return the restart information for the monitors of this rank.

    Args:
        scratch: the folder of our launcher, if there is one.
        failed_at: time of the failure after which the launcher started these ranks, ``""`` if unknown; None
            if there was no failure.
        recipe: of the run.
        world_size: ranks of the run.
        registry: the plugins.
    """
    from nanotrain_core.run.recovery import Restart

    def identity() -> dict[str, str]:
        versions = {name: str(version) for name, version in registry.versions().items()}
        own = {"the recipe": recipe_hash(recipe), "the number of ranks": str(world_size)}
        return {
            **own,
            **{f"the version of {name}": found for name, found in versions.items()},
            **{f"the code of {name}": digest for name, digest in used_code(registry, recipe).items()},
        }

    def recoverable(step: int) -> None:
        if scratch is not None and os.environ.get("LOCAL_RANK") == "0":
            with contextlib.suppress(OSError):  # a full disk: the launcher counts less progress
                write_text_atomically(scratch / RECOVERABLE, str(step), flushed=False)

    def delete_at_end(path: Path) -> None:
        if scratch is not None:
            temporary.note(path)

    return Restart(
        may_restart=int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0,
        restarted=failed_at is not None,
        failed_at=float(failed_at) if failed_at else None,
        identity=identity,
        recoverable=recoverable,
        delete_at_end=delete_at_end,
    )
