"""Finds the run that a path which is no run's folder may mean."""

from __future__ import annotations

from pathlib import Path

from nanotrain_core.errors import did_you_mean, nearby

#: What a run leaves of which one is enough to call a folder a run's.
RUN_FILES = ("metrics.jsonl", "recipe.toml", "run.log.jsonl")


def is_run(folder: Path) -> bool:
    """Return whether a run wrote to ``folder``."""
    return any((folder / name).exists() for name in RUN_FILES)


def nearby_run(path: Path) -> str:
    """Return `` (did you mean 'runs/x'?)`` for a path that is no folder, or an empty string.

    A file of a run stands for the run, and a bare name for the run in ``runs`` that has it.
    """
    # The last parent is "." or "/": where recipes lie too, so a run only if the path is a file there.
    around_it = path.parents if path.exists() else path.parents[:-1]
    for meant in (*around_it, Path("runs") / path):
        if is_run(meant):
            return f" (did you mean '{meant}'?)"
    around = [
        each.parent for folder in (path.parent, Path("runs")) for each in folder.glob("*/metrics.jsonl")
    ]
    return did_you_mean(str(path), sorted({str(each) for each in around}))


def nearby_weights(path: Path) -> str:
    """Return `` (did you mean 'x'?)`` for a path of weights that does not exist, or an empty string.

    In a run's folder it is a checkpoint that is meant; elsewhere a run, or else what lies beside the path.
    """
    if any(is_run(folder) for folder in path.parents[:-1]):
        return nearby(path)
    return nearby_run(path) or nearby(path)
