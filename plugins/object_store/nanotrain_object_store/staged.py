"""A checkpoint that waits for its upload: links to this rank's files, which retention may delete meantime."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from uuid import uuid4

import attrs

#: Folders beside the checkpoints that uploads and downloads use; a killed run leaves some.
SCRATCH = (".tmp-upload-*", ".tmp-fetch-*")


@attrs.define(eq=False)
class Staged:
    """What this rank is to upload of one checkpoint."""

    step: int
    path: Path
    """Of the checkpoint."""
    folder: bool
    """Whether that is a folder."""
    files: Mapping[str, Path]
    """By name in the checkpoint; where they can be read for as long as this is staged."""
    retention: Mapping[str, int | None] | None = None
    """What retention goes by once it is in the store: see :func:`newest_evaluated` of the core. None: nothing
    is deleted."""
    scratch: Path | None = None
    complete_at: float = attrs.field(factory=time.monotonic)
    attempts: int = 0

    def remove(self) -> None:
        """Delete the links."""
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)


def stage(
    step: int,
    path: Path,
    written: Sequence[Path] | None,
    *,
    rank: int,
    retention: Mapping[str, int | None] | None = None,
) -> Staged:
    """Link the files of a checkpoint that this rank uploads.

    Where a file system has no hard links, or the files are gone, they are read where they are.

    Args:
        step, path: of the checkpoint.
        written: which; None: all of it, whoever wrote them.
        rank: of this process.
        retention: see :class:`Staged`.
    """
    folder = path.is_dir()
    if written is None:
        written = sorted(each for each in path.rglob("*") if each.is_file()) if folder else [path]
    files = {each.relative_to(path).as_posix() if folder else each.name: each for each in written}
    scratch: Path | None = path.parent / f".tmp-upload-{step:08d}-{rank}-{uuid4().hex[:8]}"
    linked = {}
    try:
        assert scratch is not None
        scratch.mkdir()
        for number, (name, file) in enumerate(files.items()):
            linked[name] = scratch / str(number)
            os.link(file, linked[name])
    except OSError:
        shutil.rmtree(scratch, ignore_errors=True)  # type: ignore[arg-type]
        linked, scratch = dict(files), None
    return Staged(step, path, folder, linked, retention, scratch)


def clear_scratch(folder: Path) -> None:
    """Delete what uploads and downloads of a killed run have left. Nobody may be at it."""
    for pattern in SCRATCH:
        for left in folder.glob(pattern) if folder.is_dir() else ():
            shutil.rmtree(left, ignore_errors=True)
