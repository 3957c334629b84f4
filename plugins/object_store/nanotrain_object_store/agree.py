"""Work that all ranks divide among them before a run begins, and that may take longer than a hang."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

from nanotrain_core.api import NanotrainError
from nanotrain_core.api.torch import Restore

#: Seconds between two exchanges of how far the ranks are: the first, then twice as many each time, up to the
#: last.
FIRST, LAST = 0.05, 1.0


def agree(act: Callable[[Callable[[], None]], str], restore: Restore) -> str:
    """Call ``act`` on every rank, in a thread; return the first rank's problem on all ranks, "" if none.

    ``act`` calls what it receives whenever it has advanced. As long as any rank advances, all say that they
    are alive: a rank that is done, or has nothing to do, waits for the others.
    """
    mesh, ended, pieces, seconds, seen = restore.mesh, Future[str](), 0, FIRST, 0

    def advance() -> None:
        nonlocal pieces
        pieces += 1

    def work() -> None:
        try:
            ended.set_result(act(advance))
        except NanotrainError as error:
            ended.set_result(str(error))
        except OSError as error:
            ended.set_result(f"{error.filename or restore.folder}: {error.strerror or error}")
        except BaseException as error:
            ended.set_exception(error)

    run = contextvars.copy_context().run  # the log's variables
    # As a daemon it does not keep a process that is interrupted in this wait.
    threading.Thread(target=run, args=(work,), name="object-store", daemon=True).start()
    while True:
        wait([ended], seconds)
        everyone: list[tuple[str | None, int]] = mesh.gather(
            (ended.result() if ended.done() else None, pieces)
        )
        problems = [text for text, _ in everyone]
        if None not in problems:
            return next((f"rank {rank}: {text}" for rank, text in enumerate(problems) if text), "")
        seconds, before, seen = min(2 * seconds, LAST), seen, sum(count for _, count in everyone)
        if seen > before:
            restore.heartbeat()
