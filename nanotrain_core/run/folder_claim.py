"""Claims the folder of a run without launcher for each call of fit: two would replace their checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet

from nanotrain_core.errors import FolderError
from nanotrain_core.run.folder import RunFolder, is_surely_gone

if TYPE_CHECKING:
    from nanotrain_core.engine import RuntimeEngine

_held: WeakSet[RunFolder] = WeakSet()
_claims: WeakKeyDictionary[RuntimeEngine, str] = WeakKeyDictionary()
"""What each engine's last call of fit has written into the lock."""


@contextmanager
def claimed(engine: RuntimeEngine) -> Iterator[None]:
    """Claim the engine's run folder within the block, on rank 0 for all; not where its launcher has done so.

    Raises:
        FolderLocked: another process trains there.
        FolderError: it cannot be written, or another run has trained there since this engine last did.
    """
    stop, folder, mesh = engine.stop, engine.folder, engine.run.mesh
    if folder is None or stop.folder_gone is not None:
        yield
        return
    found: RunFolder | None = None
    problem: FolderError | None = None
    if mesh.rank == 0:
        try:
            found = RunFolder.claim(
                engine.run.name, folder=str(folder), resume=True, after=_claims.get(engine)
            )
            _held.add(found)
            _claims[engine] = found.owner()
        except FolderError as error:
            problem = error
            if found is not None:
                found.release()
    if problem := mesh.gather(problem)[0]:
        raise problem
    if found is not None:
        stop.folder_gone = partial(is_surely_gone, folder, found.lock, stop)
    try:
        yield
    finally:
        stop.folder_gone = None
        if found is not None:
            found.release()


def _release_all() -> None:
    """In a forked child, such as a loader's worker: it would hold the lock for longer than its parent."""
    for folder in [*_held]:
        folder.release()


os.register_at_fork(after_in_child=_release_all)
