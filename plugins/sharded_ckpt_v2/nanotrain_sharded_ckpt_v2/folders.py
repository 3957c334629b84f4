"""The folder of a run's checkpoints: its entries, retention, and moving checkpoints aside. Torch-free.

``step-00001200/`` is a checkpoint, ``.tmp-...`` one being written, ``.corrupt-...`` a damaged one,
``superseded-.../`` holds those of an abandoned branch, ``latest`` names the newest, for people and
scripts: nothing here reads it.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import structlog

from nanotrain_core.api import (
    CheckpointError,
    flush,
    is_run_state,
    quarantine_checkpoint,
    remove_leftovers,
    set_checkpoints_aside,
    streams_problem,
    write_text_atomically,
)
from nanotrain_sharded_ckpt_v2 import manifest, shard

#: As saves write it: eight digits, and more only where a step has more.
_STEP = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,})")
LATEST = "latest"


def step_folder(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of ``step``."""
    return folder / f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """Return the step of a checkpoint's folder, None if its name has another form."""
    found = _STEP.fullmatch(path.name)
    return int(found[1]) if found else None


def steps(folder: Path) -> list[int]:
    """Return the steps that have a checkpoint, oldest first."""
    return [step for step in once_saved(folder) if (step_folder(folder, step) / manifest.NAME).is_file()]


def once_saved(folder: Path) -> list[int]:
    """Return the steps that have a folder, oldest first: one without a manifest is damaged."""
    found = ((path, step_of(path)) for path in folder.glob("step-*"))
    return sorted(step for path, step in found if step is not None and _is_folder(path))


def age(folder: Path) -> float:
    """Return the seconds since the newest checkpoint was saved, or since the run began if there is none.

    Zero if neither is known. The run wrote its recipe next to ``folder`` when it began.
    """
    there = steps(folder)
    newest = step_folder(folder, there[-1]) / manifest.NAME if there else folder.parent / "recipe.toml"
    with suppress(OSError):
        return max(0.0, time.time() - newest.stat().st_mtime)
    return 0.0


def unexpected_entries(folder: Path) -> list[Path]:
    """Return entries that only resemble a checkpoint: a copy, a plain file, a link."""
    return sorted(path for path in folder.glob("step-*") if step_of(path) is None or not _is_folder(path))


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


# --- a checkpoint appears -------------------------------------------------------------------------


def clear_leftovers(folder: Path) -> None:
    """Delete the remains of killed saves. No save may be in progress.

    Those that cannot be deleted, as when another client of NFS has a file of it open, only take space.
    """
    if not folder.is_dir():
        return
    for pattern in (".tmp-*", ".old-*"):
        for leftover in filter(_is_folder, folder.glob(pattern)):  # anything else is not ours
            try:
                shutil.rmtree(leftover)
            except OSError as problem:
                log = structlog.get_logger("nanotrain.checkpoint")
                log.warning("a leftover could not be deleted", path=str(leftover), problem=problem.strerror)
    remove_leftovers(folder)


def make_scratch(folder: Path, step: int) -> Path:
    """Create the folder that a checkpoint is written to."""
    scratch = folder / f".tmp-{step:08d}-{uuid4().hex}"
    scratch.mkdir(parents=True)
    return scratch


def publish(scratch: Path, text: str, step: int) -> Path:
    """Complete a checkpoint with its manifest, and move it into place by one rename.

    Files, manifest, folder and parent are flushed to disk in this order: after a power failure there is
    either the whole checkpoint or none.
    """
    write_text_atomically(scratch / manifest.NAME, text)
    folder = scratch.parent
    target = step_folder(folder, step)
    if os.path.lexists(target):  # of an abandoned branch, or no checkpoint at all
        set_aside(folder, [step])
    scratch.rename(target)
    flush(folder)
    name_latest(folder)
    return target


def name_latest(folder: Path) -> None:
    """Make ``latest`` name the newest checkpoint, if possible: nothing here reads it."""
    with suppress(OSError):
        there = steps(folder)
        if there:
            write_text_atomically(folder / LATEST, f"{step_folder(folder, there[-1]).name}\n")
        else:
            (folder / LATEST).unlink(missing_ok=True)


# --- a checkpoint goes ----------------------------------------------------------------------------


def quarantine(folder: Path, step: int) -> Path:
    """Rename a damaged checkpoint, so that its step can be saved again; return its new path."""
    target = quarantine_checkpoint(step_folder(folder, step))
    name_latest(folder)
    return target


def set_aside(folder: Path, unwanted: Collection[int]) -> Path | None:
    """Move checkpoints of an abandoned branch into ``superseded-<time>/``; return that folder, if any."""
    aside = set_checkpoints_aside(folder, [step_folder(folder, step) for step in unwanted])
    if aside is not None:
        name_latest(folder)
    return aside


def expendable(
    folder: Path, keep: int, protected: Collection[int], verified: Mapping[int, Mapping[str, manifest.File]]
) -> list[int]:
    """Return the steps that retention may delete: all except the ``keep`` newest sound ones.

    Always kept are those ``protected`` and the newest sound ``verified`` one. While there is none, nothing is
    deleted. A checkpoint is sound if it has a valid manifest and files of the right size; the manifest of a
    verified one is not read again.
    """
    there = steps(folder)
    sound = [step for step in there if not _damaged(step_folder(folder, step), verified.get(step))]
    known = [step for step in sound if step in verified]
    if not known:
        return []
    stay = {*sound[-keep:], known[-1], *protected}
    oldest = min(sound[-keep:])
    return [step for step in there if step < oldest and step not in stay]


def _damaged(path: Path, known: Mapping[str, manifest.File] | None) -> bool:
    if known is None:
        return bool(damage(path, full=False))
    return any(shard.damage(path, name, file, full=False) for name, file in known.items())


def retire(folder: Path, step: int) -> Path:
    """Rename a checkpoint before deletion: a partial one must not be mistaken for one. Return its path."""
    gone = folder / f".old-{step:08d}-{uuid4().hex}"
    step_folder(folder, step).rename(gone)
    return gone


# --- is it whole ----------------------------------------------------------------------------------


def damage(path: Path, *, full: bool) -> list[str]:
    """Return what is wrong with a checkpoint: empty if it is intact."""
    try:
        found = open_manifest(path)
    except CheckpointError as problem:
        return [str(problem)]
    files = (shard.damage(path, name, file, full=full) for name, file in found.files.items())
    problems = [problem for problem in files if problem]
    problems = problems or [problem for problem in _misfits(path, found) if problem]
    return problems or ([*_not_finite(path, found), *_no_streams(path, found)] if full else [])


def _not_finite(path: Path, found: manifest.Manifest) -> Iterator[str]:
    """Yield the weights with a NaN or an infinity. Names of optimizer state contain a slash."""
    for name, forms in forms_of(found).items():
        weights = [key for key in forms if "/" not in manifest.name_of(key)]
        for key in shard.not_finite(path / name, weights):
            yield f"{path / name}: {key} is not finite"


def _no_streams(path: Path, found: manifest.Manifest) -> Iterator[str]:
    """Yield the files of a run whose random-number streams cannot be restored."""
    if not is_run_state(found.meta):
        return
    for name in found.files.keys() - forms_of(found).keys():
        if problem := streams_problem(shard.arrays(path / name)):
            yield f"{path / name}: {problem}"


def open_manifest(path: Path) -> manifest.Manifest:
    """Return the verified manifest of a checkpoint whose folder matches it exactly.

    Raises:
        CheckpointError: it is damaged, or the folder does not match it.
    """
    found = manifest.read(path)
    check_folder(path, found)
    return found


def check_folder(path: Path, found: manifest.Manifest) -> None:
    """Check a folder's name and entries against its manifest.

    Raises:
        CheckpointError: they differ.
    """
    if path.is_symlink():
        raise CheckpointError(f"{path} is a symbolic link")
    if step_of(path) not in (None, found.step):
        raise CheckpointError(f"{path} has the checkpoint of step {found.step}")
    known = {manifest.NAME, *found.files}
    extra = sorted(entry.name for entry in path.iterdir() if entry.name not in known)
    if extra:
        raise CheckpointError(f"{path} holds {extra[0]!r}, which its manifest does not name")


def _misfits(path: Path, found: manifest.Manifest) -> Iterator[str]:
    forms = forms_of(found)
    for name in found.files:
        if name in forms:
            yield shard.misfit(path / name, forms[name])
        else:  # random-number streams: those of devices are checked when loaded
            yield shard.unreadable(path / name)


def forms_of(found: manifest.Manifest) -> dict[str, dict[str, shard.Form]]:
    """Return, for every shard, the tensors that the manifest lists for it."""
    forms: dict[str, dict[str, shard.Form]] = {}
    for name, tensor in found.tensors.items():
        for number, offset, shape in tensor.chunks:
            entries = forms.setdefault(manifest.shard_name(number), {})
            entries[manifest.key(name, offset)] = shard.Form(tensor.dtype, shape)
    return forms


def seal(path: Path) -> str | None:
    """Return the SHA-256 of a checkpoint's manifest, None if it is damaged."""
    try:
        return manifest.seal_of(manifest.read_text(path))
    except (CheckpointError, ValueError):
        return None
