"""The end of a rank's process groups: destroyed after its work, and left alone after a failure on NCCL."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nanotrain_core.errors import Exit
from nanotrain_core.launch.cause import exit_code_of

#: Held while process groups are aborted: the main thread and the one that ends an attempt may both do so.
_aborting = threading.Lock()


@contextmanager
def ending_process_groups(*, kept: bool = False) -> Iterator[None]:
    """Destroy all process groups after the block, if any were created in it.

    After an exception on NCCL they stay, and the process ends without them: destroying a communicator is
    collective over the ranks of a host, and drains what is in flight. A rank that has failed alone, with
    others in a collective that it will never enter, would hang there and never report its error.

    Args:
        kept: whether the process is used again after another rank's failure: NCCL's communicators are then
            aborted, which waits for no rank.
    """
    try:
        yield
    except BaseException as problem:
        _end_groups(problem, kept)
        raise
    _end_groups(None, kept)


def abort_process_groups() -> None:
    """End NCCL's collectives in flight, whose results are then undefined, and all process groups.

    Those of gloo end by themselves when a connection to another rank is closed.
    """
    dist = _distributed()
    with _aborting:
        if dist is not None and dist.is_initialized() and dist.get_backend() == "nccl":
            dist.distributed_c10d._abort_process_group()


def _end_groups(problem: BaseException | None, kept: bool) -> None:
    if problem is not None and kept:
        abort_process_groups()
    dist = _distributed()
    if dist is None or not dist.is_initialized():
        return
    if problem is None or dist.get_backend() != "nccl":
        dist.destroy_process_group()
        return
    code = Exit.INTERRUPTED if isinstance(problem, KeyboardInterrupt) else exit_code_of(problem)
    atexit.register(_end_at_once, code)


def _distributed() -> Any:
    """Return ``torch.distributed`` if this process has imported it, else None: there are no groups to end.

    An interrupt may have ended its import, and importing the rest of a half-imported torch can crash.
    """
    dist = sys.modules.get("torch.distributed")
    return None if getattr(getattr(dist, "__spec__", None), "_initializing", False) else dist


def _end_at_once(code: int) -> None:
    """End the process without destructors, which abort communicators and may hang, too."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
