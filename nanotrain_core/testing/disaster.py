"""Interrupts a save at every disk write.

Each attempt is a forked child, or one for each rank. *Killed*: it, or one of them, dies with SIGKILL before
the n-th call that writes, for n from 1 until a save runs to its end (``points.py`` says which of very many):
what the disk has after a call is what it has before the next. *Out of space*: no file can grow beyond a
limit, from a few bytes up to nearly all it needs; libraries that write from C meet it too.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from io import BytesIO, StringIO
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import attrs

from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.testing.case import Case
from nanotrain_core.testing.points import up_to_the_end

#: Names of functions, in Python's library or a package's C code, that change what is on the disk.
WRITES = {"open", "write", "writelines", "close", "flush", "truncate", "serialize_file"}
WRITES |= {"write_record", "write_end_of_file", "fsync", "fdatasync"}
WRITES |= {"replace", "rename", "link", "symlink", "unlink", "remove", "rmdir", "mkdir"}
#: Whose methods of these names write nothing to a disk: pickling writes to them, and so do locks and queues.
IN_MEMORY = (BytesIO, StringIO, bytearray, deque, list, set, dict)
#: Sizes that no file can exceed, as fractions of the largest file of a complete save.
LIMITS = (0.0, 0.01, 0.5, 0.99)


@attrs.define(frozen=True)
class Outcome:
    """One interrupted save."""

    folder: Path
    point: str
    error: str
    """What was wrong already: a full disk that was not reported."""
    announced: bool = False
    """Whether a rank took the save for complete."""


def save_and_die(case: Case, folder: Path, disaster: str) -> list[Outcome]:
    """Save step 1, then try to save step 2 repeatedly, each time interrupted at another write."""
    from nanotrain_core.testing.saving import numbered, open_state, save

    saved = folder / "saved"
    checkpoint, state = open_state(case, saved)
    save(checkpoint, 1, numbered(state, 1))
    second = numbered(state, 2)

    def attempt(number: int, arm: Callable[[], None]) -> tuple[Path, str]:
        """Save step 2 in a copy of the folder, in a child; return the copy and how it ended."""
        copy = folder / f"attempt-{number}"
        shutil.copytree(saved, copy)

        def save_second() -> None:
            checkpoint.open(copy, Mesh(Layout({"dense": View(("dp",), (1,))})))
            arm()
            save(checkpoint, 2, second)

        return copy, end_of_child(save_second)

    return _killed(attempt) if disaster == "killed" else _out_of_space(attempt, saved)


def end_of_child(function: Callable[[], None]) -> str:
    """Run ``function`` in a forked child; return ``done``, ``killed`` or the error it raised."""
    return end_of(start_child(function))


def start_child(function: Callable[[], None]) -> tuple[int, int]:
    """Run ``function`` in a forked child; return its pid, and a pipe for :func:`end_of`."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            function()
            os.write(writer, b"done")
        except BaseException as error:
            sys.setprofile(None)
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    return child, reader


def end_of(child: tuple[int, int]) -> str:
    """Wait for a child; return how it ended."""
    pid, reader = child
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(pid, 0)
    return text or "killed"


def save_and_lose(case: Case, folder: Path, victim: int) -> list[Outcome]:
    """Save step 1 on all ranks, then step 2 repeatedly, each time with one rank killed at another write."""
    from nanotrain_core.testing.saving import numbered, open_state, save

    def save_step(copy: Path, step: int, arm: Callable[[], None]) -> None:
        checkpoint, state = open_state(case, copy)
        state = numbered(state, step)
        arm()
        save(checkpoint, step, state)

    saved = folder / "saved"
    ends = ends_of_ranks(case.world_size, folder / "store", lambda rank: save_step(saved, 1, lambda: None))
    assert ends == ["done"] * case.world_size, ends
    outcomes: list[Outcome] = []

    def ends_before(number: int) -> bool:
        copy = folder / f"attempt-{number}"
        shutil.copytree(saved, copy)

        def save_second(rank: int) -> None:
            save_step(copy, 2, partial(kill_at, number) if rank == victim else lambda: None)

        ends = ends_of_ranks(case.world_size, folder / f"store-{number}", save_second)
        error = "" if ends[victim] in ("done", "killed") else f"rank {victim} ended with {ends[victim]}"
        outcomes.append(Outcome(copy, f"at write {number} of rank {victim}", error, "done" in ends))
        return ends[victim] != "killed"

    up_to_the_end(ends_before)
    return outcomes


#: Seconds after which a rank that waits for one that is gone is killed, as a launcher would.
LEFT_BEHIND = 30


def ends_of_ranks(ranks: int, store: Path, function: Callable[[int], None]) -> list[str]:
    """Run ``function`` of the rank in forked children that form a gloo group; return how each ended."""
    import torch.distributed as dist

    def take_part(rank: int) -> None:
        signal.alarm(LEFT_BEHIND)
        meeting = dist.FileStore(str(store), ranks)
        dist.init_process_group("gloo", store=meeting, rank=rank, world_size=ranks)
        function(rank)

    return [end_of(child) for child in [start_child(partial(take_part, rank)) for rank in range(ranks)]]


Attempt = Callable[[int, Callable[[], None]], tuple[Path, str]]


def _killed(attempt: Attempt) -> list[Outcome]:
    outcomes: list[Outcome] = []

    def ends_before(number: int) -> bool:
        folder, end = attempt(number, partial(kill_at, number))
        error = "" if end in ("done", "killed") else f"the save ended with {end}"
        outcomes.append(Outcome(folder, f"at write {number}", error))
        return end != "killed"

    up_to_the_end(ends_before)
    return outcomes


def kill_at(number: int) -> None:
    """Die before the ``number``-th writing call.

    Calls of threads that begin from now on count too: a save may be written in one.
    """
    seen = 0

    def watch(frame: FrameType, event: str, function: Any) -> None:
        nonlocal seen
        if event == "c_call" and writes(function):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(watch)
    sys.setprofile(watch)


def writes(function: Any) -> bool:
    """Return whether a C function, by its name and owner, may change what is on disk."""
    name, owner = getattr(function, "__name__", ""), getattr(function, "__self__", None)
    if name == "close" and isinstance(owner, ModuleType):
        return False  # os.close: nothing waits in a descriptor, as it does in Python's files
    return name in WRITES and not isinstance(owner, IN_MEMORY)


def _out_of_space(attempt: Attempt, saved: Path) -> list[Outcome]:
    largest = max(path.stat().st_size for path in saved.rglob("*") if path.is_file())
    outcomes = []
    for number, fraction in enumerate(LIMITS):
        limit = int(largest * fraction)
        folder, end = attempt(number, partial(_limit_files, limit))
        reported = end.startswith("CheckpointError")
        error = "" if reported else f"expected a CheckpointError, the save ended with {end}"
        outcomes.append(Outcome(folder, f"after {limit} bytes", error))
    return outcomes


@contextmanager
def no_space() -> Iterator[None]:
    """Make every write of this process fail within the block."""
    handler = signal.getsignal(signal.SIGXFSZ)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    _limit_files(0)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def _limit_files(limit: int) -> None:
    """Make writes beyond ``limit`` fail with "File too large", which programs handle like a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
