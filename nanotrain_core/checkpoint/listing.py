"""Which checkpoints are at a path, of whatever kind, and whether a run can go on from them. Torch-free."""

from __future__ import annotations

from pathlib import Path

from nanotrain_core.checkpoint.info import CheckpointInfo
from nanotrain_core.errors import CheckpointError
from nanotrain_core.registry.registry import Registry


def listed(path: Path, use: str, registry: Registry) -> list[CheckpointInfo]:
    """Return what the listing of component ``use`` lists at ``path``; nothing without a listing."""
    list_checkpoints = registry.get("checkpoint", use).load_optional("listing")
    return list(list_checkpoints(path)) if list_checkpoints is not None and path.exists() else []


def expect_own_kind(folder: Path, resume: str | None, use: str, registry: Registry) -> None:
    """Refuse to resume where only other kinds are saved, or from a path that holds several.

    A run that begins anew beside checkpoints that it cannot read has lost them without a word.

    Args:
        folder: of the run.
        resume: ``"auto"``, ``"latest"``, a step or a path; None: it does not.
        use: the component that the recipe names.

    Raises:
        CheckpointError: with the kind that is there, or the checkpoint that was meant.
    """
    if resume is None or registry.get("checkpoint", use).listing is None:
        return
    by_path = resume not in ("auto", "latest") and not resume.isdecimal()
    at = Path(resume) if by_path else folder / "checkpoints"
    own = listed(at, use, registry)
    if own and by_path and at.resolve() not in [saved.path.resolve() for saved in own]:
        raise CheckpointError(f"{at} is no checkpoint but holds some; expected one, such as {own[-1].path}")
    for other in () if own else registry.names("checkpoint"):
        found = listed(at, other, registry)
        if found:
            steps = ", ".join(str(saved.step) for saved in found)
            raise CheckpointError(
                f"{at} holds checkpoints of '{other}' (steps {steps}) and none of '{use}': "
                f'set checkpoint.use = "{other}", or see `nanotrain ckpt convert`'
            )
