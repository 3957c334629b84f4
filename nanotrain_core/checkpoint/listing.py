"""Lists checkpoints of any format at a path, and checks whether a run can resume from them. Torch-free."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from nanotrain_core.checkpoint.info import CheckpointInfo
from nanotrain_core.errors import CheckpointError
from nanotrain_core.registry.registry import Registry

#: How often a folder is listed again of which files were deleted meanwhile.
AGAIN = 4


def listed(path: Path, use: str, registry: Registry) -> list[CheckpointInfo]:
    """Return what the listing of component ``use`` lists at ``path``; nothing without a listing.

    A live run may delete a checkpoint that is being listed: then they are listed again.
    """
    list_checkpoints = registry.get("checkpoint", use).load_optional("listing")
    if list_checkpoints is None or not path.exists():
        return []
    for _ in range(AGAIN):
        with suppress(FileNotFoundError):
            return list(list_checkpoints(path))
    return list(list_checkpoints(path))


def listed_of_all(path: Path, registry: Registry) -> list[tuple[str, CheckpointInfo]]:
    """Return (component, checkpoint) of every format at ``path``; oldest first."""
    found = [(use, saved) for use in registry.names("checkpoint") for saved in listed(path, use, registry)]
    return sorted(found, key=lambda item: item[1].step)


def newest_path(path: Path, registry: Registry) -> Path:
    """Return the newest checkpoint of any format at ``path``.

    Raises:
        CheckpointError: two of different formats are equally new, or no format that is there has a listing.
    """
    found = listed_of_all(path, registry)
    newest = sorted({saved.path for _, saved in found if saved.step == found[-1][1].step})
    if len(newest) != 1:
        several = " and ".join(map(str, newest)) or "those of several formats that list none"
        raise CheckpointError(
            f"{path}: no checkpoint is newer than all others: {several}; name one by its path"
        )
    return newest[0]


def resume_path(resume: str | None) -> Path | None:
    """Return the path that ``--resume`` names; None for a step, ``"latest"``, ``"auto"`` or nothing."""
    if resume is None or resume in ("auto", "latest") or resume.isdecimal():
        return None
    return Path(resume)


def expect_own_kind(folder: Path, resume: str | None, use: str, registry: Registry) -> None:
    """Reject a resume if the newest checkpoint has another format, or if its path holds several checkpoints.

    Otherwise the run would start from the beginning, or from an older step, and silently ignore checkpoints
    that it cannot read. A step that is named may be older.

    Args:
        folder: of the run.
        resume: ``"auto"``, ``"latest"``, a step or a path; None: do not resume.
        use: the component that the recipe names.

    Raises:
        CheckpointError: the text names the format found, or the checkpoint that was probably meant.
    """
    if resume is None or registry.get("checkpoint", use).listing is None:
        return
    path = resume_path(resume)
    at = path or folder / "checkpoints"
    found = listed_of_all(at, registry)
    own = [saved for kind, saved in found if kind == use]
    if own and path and at.resolve() not in [saved.path.resolve() for saved in own]:
        raise CheckpointError(f"{at} is no checkpoint but holds some; expected one, such as {own[-1].path}")
    if found and (not own or (found[-1][1].step > own[-1].step and not resume.isdecimal())):
        other = found[-1][0]
        steps = ", ".join(str(saved.step) for kind, saved in found if kind == other)
        ours = f"no newer one of '{use}' than that of step {own[-1].step}" if own else f"none of '{use}'"
        instead = f"name a step: --resume {own[-1].step}" if own else "see `nanotrain ckpt convert`"
        raise CheckpointError(
            f"{at} holds checkpoints of '{other}' (steps {steps}) and {ours}: "
            f'set checkpoint.use = "{other}", or {instead}'
        )
