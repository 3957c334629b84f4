"""Lists checkpoints of any format at a path, and checks whether a run can resume from them. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from nanotrain_core.checkpoint.info import CheckpointInfo
from nanotrain_core.errors import CheckpointError, PluginError, as_plugin_error, expect_result
from nanotrain_core.registry.registry import Registry

#: How often a folder is listed again of which files were deleted meanwhile.
AGAIN = 4

#: What the description of every checkpoint has.
DESCRIBED = {"meta": Mapping, "world_size": int, "tensors": Mapping, "files": Mapping}


def listed(path: Path, use: str, registry: Registry) -> list[CheckpointInfo]:
    """Return what the listing of component ``use`` lists at ``path``; nothing without a listing.

    A live run may delete a checkpoint that is being listed: then they are listed again.

    Raises:
        PluginError: the listing raised an error, or returned something else. So does a description.
    """
    list_checkpoints = registry.get("checkpoint", use).load_optional("listing")
    if list_checkpoints is None or not path.exists():
        return []
    label = f"checkpoint '{use}' of {registry.owner('checkpoint', use)}"
    with as_plugin_error(f"{label}: its listing"):
        for _ in range(AGAIN):
            with suppress(FileNotFoundError):
                return [_checked(label, saved) for saved in list_checkpoints(path)]
        return [_checked(label, saved) for saved in list_checkpoints(path)]


def _checked(label: str, saved: Any) -> CheckpointInfo:
    """Return an item of a listing, whose description is checked when it is asked for."""
    info: CheckpointInfo = expect_result(label, "listing, among its items,", saved, CheckpointInfo)
    return attrs.evolve(info, describe=partial(_described, label, info.describe))


def _described(label: str, describe: Callable[[], Any]) -> Mapping[str, Any]:
    with as_plugin_error(f"{label}: describe() of its listing"):
        found: Mapping[str, Any] = expect_result(label, "listing's describe()", describe(), Mapping)
    lacks = [key for key, kind in DESCRIBED.items() if not isinstance(found.get(key), kind)]
    lacks = lacks or [
        f"{key}.{name}.{part}"
        for key, parts in (("tensors", ("dtype", "shape")), ("files", ("sha256",)))
        for name, entry in found[key].items()
        for part in parts
        if not isinstance(entry, Mapping) or part not in entry
    ]
    if lacks:
        wanted = ", ".join(f"{key} ({kind.__name__})" for key, kind in DESCRIBED.items())
        raise PluginError(
            f"{label}: describe() of its listing returned no {lacks[0]}; expected {wanted}, of each tensor "
            "dtype and shape, of each file sha256"
        )
    return found


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
