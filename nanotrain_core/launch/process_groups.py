"""The end of a rank's process groups: destroyed after its work, and left alone after a failure on NCCL."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from nanotrain_core.errors import Exit
from nanotrain_core.launch.cause import exit_code_of


@contextmanager
def ending_process_groups() -> Iterator[None]:
    """Destroy all process groups after the block, if any were created in it.

    After an exception on NCCL they stay, and the process ends without them: destroying a communicator is
    collective over the ranks of a host, and drains what is in flight. A rank that has failed alone, with
    others in a collective that it will never enter, would hang there and never report its error.
    """
    try:
        yield
    except BaseException as problem:
        _end_groups(problem)
        raise
    _end_groups(None)


def _end_groups(problem: BaseException | None) -> None:
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    if problem is None or dist.get_backend() != "nccl":
        dist.destroy_process_group()
        return
    code = Exit.INTERRUPTED if isinstance(problem, KeyboardInterrupt) else exit_code_of(problem)
    atexit.register(_end_at_once, code)


def _end_at_once(code: int) -> None:
    """End the process without destructors, which abort communicators and may hang, too."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
