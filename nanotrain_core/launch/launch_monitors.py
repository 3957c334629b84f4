"""Monitors that a launch adds to a run, the same on every rank, and the recipe that one of them keeps."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from time import time

from nanotrain_core.contracts import CheckpointReport, Monitor, RunInfo, StepEnd
from nanotrain_core.engine import RuntimeEngine
from nanotrain_core.errors import FolderError
from nanotrain_core.recipe.secrets import without_secrets
from nanotrain_core.run.files import write_text_atomically
from nanotrain_core.run.log import record
from nanotrain_core.run.recovery import Restart


class AtStart(Monitor):
    """Calls a function on rank 0 at the start of the run, when it can no longer be rejected."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act

    def on_start(self, run: RunInfo) -> None:
        """Call the function."""
        if run.rank == 0:
            self.act()


class SaveMarker(Monitor):
    """Creates a file when a checkpoint has been saved: a restarted run then resumes from its own."""

    def __init__(self, path: Path, launch: str = "") -> None:
        self.path, self.launch = path, launch

    def on_checkpoint(self, report: CheckpointReport) -> None:
        """Create the file, with the names of the launch if others may use the same file."""
        if self.launch:
            write_text_atomically(self.path, self.launch)
            self.launch = ""
        self.path.touch()


class FirstStep(Monitor):
    """Records the time from a failure to the run's next completed step."""

    def __init__(self, restart: Restart) -> None:
        self.restart: Restart | None = restart

    def on_start(self, run: RunInfo) -> None:
        """Store the run's information."""
        self.restart = self.restart if run.rank == 0 else None

    def on_step_end(self, end: StepEnd) -> None:
        """Report the time, after the first step only."""
        if self.restart is not None and self.restart.failed_at is not None:
            seconds = round(time() - self.restart.failed_at, 2)
            record("info", "the first step after a failure", step=end.step, seconds=seconds)
            self.restart = None


def add_launch_monitors(
    engine: RuntimeEngine, keep_recipe: Callable[[], None], marker: SaveMarker | None
) -> None:
    """Add monitors to a run: the one that keeps its recipe before the run's own, the others after them.

    Args:
        engine: of the run.
        keep_recipe: called on rank 0 when the run starts.
        marker: if the ranks may be restarted.
    """
    behind: list[Monitor] = [marker] if marker is not None else []
    behind += [FirstStep(engine.restart)] if engine.restart.failed_at else []
    engine.events.monitors = [AtStart(keep_recipe), *engine.events.monitors, *behind]


def keep_recipe(folder: Path, text: str, explained: str) -> None:
    """Write the resolved recipe as ``recipe.toml``, or ``recipe-2.toml`` if a resumed run changed it.

    The newest file is what the run goes by: one that goes back to an earlier recipe writes that once more.
    The origin of each of its values is in ``recipe.explained`` next to it. Who repeats the run needs all
    values: with a secret among them, only the owner may read the files.

    Raises:
        FolderError: it cannot be written.
    """
    names = (re.fullmatch(r"recipe(?:-(\d+))?\.toml", path.name) for path in folder.glob("recipe*.toml"))
    kept = {int(name[1] or 1): folder / name[0] for name in names if name}
    newest = max(kept, default=0)
    if newest and kept[newest].read_text(encoding="utf-8") == text:
        return
    path = folder / (f"recipe-{newest + 1}.toml" if newest else "recipe.toml")
    try:
        secret = without_secrets(text) != text
        write_text_atomically(path.with_suffix(".explained"), explained, private=secret)
        write_text_atomically(path, text, private=secret)
    except OSError as problem:
        raise FolderError(f"{path} cannot be written: {problem.strerror}") from problem
