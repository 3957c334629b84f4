"""The checkpoints of a folder, listed, described and verified without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from nanotrain_core.api import CheckpointInfo
from nanotrain_sharded_ckpt_v2 import folders, manifest


def list_checkpoints(path: Path) -> list[CheckpointInfo]:
    """Return those of a run folder, of the folder they are in, or the one at ``path``; oldest first."""
    if (path / manifest.NAME).is_file():
        return [_saved(path, folders.step_of(path) or 0)]
    parents = (parent for parent in (path, path / "checkpoints") if parent.is_dir())
    return [
        _saved(folders.step_folder(parent, step), step)
        for parent in parents
        for step in folders.once_saved(parent)
        if not _is_anothers(folders.step_folder(parent, step))
    ]


def _is_anothers(folder: Path) -> bool:
    """Return whether another format has written the folder: it has files, and none is named as ours are."""
    names = [path.name for path in folder.iterdir()]
    return bool(names) and not any(name == manifest.NAME or manifest.BESIDE.fullmatch(name) for name in names)


def _saved(path: Path, step: int) -> CheckpointInfo:
    return CheckpointInfo(
        step=step,
        path=path,
        nbytes=sum(file.stat().st_size for file in path.iterdir() if file.is_file()),
        describe=partial(_describe, path),
        verify=partial(folders.damage, path, full=True),
    )


def _describe(path: Path) -> Mapping[str, Any]:
    """Return the manifest as written, after verification."""
    text = manifest.read_text(path)
    manifest.parse(text, path)
    found: dict[str, Any] = json.loads(text)
    return found
