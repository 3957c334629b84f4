"""Suggests the run that the user may mean by a path that is not a run folder."""

from __future__ import annotations

from pathlib import Path

from nanotrain_core.errors import did_you_mean, did_you_mean_path

#: Files of a run, any of which identifies a run folder.
RUN_FILES = ("metrics.jsonl", "recipe.toml", "run.log.jsonl")


def is_run(folder: Path) -> bool:
    """Return whether a run wrote to ``folder``."""
    return any((folder / name).exists() for name in RUN_FILES)


def did_you_mean_run(path: Path) -> str:
    """Return `` (did you mean 'runs/x'?)`` for a path that is no run folder, or an empty string.

    A file in a run folder matches that run, and a bare name matches the run of that name in ``runs``.
    """
    # The last parent is "." or "/", which contains recipes too: it is a run only if the path is a file there.
    around_it = path.parents if path.exists() else path.parents[:-1]
    for meant in (*around_it, Path("runs") / path):
        if is_run(meant):
            return f" (did you mean '{meant}'?)"
    around = [
        each.parent for folder in (path.parent, Path("runs")) for each in folder.glob("*/metrics.jsonl")
    ]
    return did_you_mean(str(path), sorted({str(each) for each in around}))


def did_you_mean_weights(path: Path) -> str:
    """Return `` (did you mean 'x'?)`` for a path of weights that does not exist, or an empty string.

    In a run folder a checkpoint is suggested; elsewhere a run, otherwise the nearest sibling of the path.
    """
    if any(is_run(folder) for folder in path.parents[:-1]):
        return did_you_mean_path(path)
    return did_you_mean_run(path) or did_you_mean_path(path)
