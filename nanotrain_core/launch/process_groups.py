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
        if _backend() == "nccl":
            code = Exit.INTERRUPTED if isinstance(problem, KeyboardInterrupt) else exit_code_of(problem)
            atexit.register(_end_at_once, code)
        else:
            _destroy()
        raise
    _destroy()


def _backend() -> str | None:
    import torch.distributed as dist

    return dist.get_backend() if dist.is_initialized() else None


def _destroy() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _end_at_once(code: int) -> None:
    """End the process without destructors, which abort communicators and may hang, too."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
