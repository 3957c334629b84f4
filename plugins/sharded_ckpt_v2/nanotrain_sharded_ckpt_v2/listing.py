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
    found = (folder for folder in _candidates(path) if not _is_anothers(folder))
    return [_saved(folder, folders.step_of(folder) or 0) for folder in found]


def newest(path: Path) -> Path | None:
    """Return the folder of the last one of :func:`list_checkpoints`, without looking at the others' files."""
    return next((folder for folder in reversed(_candidates(path)) if not _is_anothers(folder)), None)


def _candidates(path: Path) -> list[Path]:
    """Return the folders named as checkpoints; one without a manifest is damaged, or of another format."""
    if (path / manifest.NAME).is_file():
        return [path]
    parents = (parent for parent in (path, path / "checkpoints") if parent.is_dir())
    return [folders.step_folder(parent, step) for parent in parents for step in folders.once_saved(parent)]


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
