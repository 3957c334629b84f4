"""File names of ``simple`` checkpoints, and other entries in their folder. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

#: A file name as saves write it: the step with eight digits, or more if eight are not enough.
_NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,})\.safetensors")


def step_of(path: Path) -> int:
    """Return the step in the name of a file that :func:`own` yields."""
    found = named_step(path)
    assert found is not None
    return found


def named_step(path: Path) -> int | None:
    """Return the step in a file's name, None if it has another form."""
    found = _NAME.fullmatch(path.name)
    return int(found[1]) if found else None


def saved_steps(folder: Path) -> list[int]:
    """Return the steps saved in ``folder``, oldest first. Entries with other names are ignored."""
    return sorted(map(step_of, own(folder.glob("step-*"))))


def unexpected_entries(folder: Path) -> list[Path]:
    """Return entries of ``folder`` that only resemble a checkpoint: a copy, a folder, a dangling link."""
    there = sorted(folder.glob("step-*"))
    mine = set(own(there))
    return [path for path in there if path not in mine]


def own(candidates: Iterable[Path]) -> Iterator[Path]:
    """Yield the files named like a checkpoint."""
    return (file for file in candidates if _NAME.fullmatch(file.name) and file.is_file())
