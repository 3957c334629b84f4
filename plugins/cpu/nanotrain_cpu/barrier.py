"""A barrier for processes of one host, in shared memory: a meeting, one use of it, takes microseconds.

A barrier over gloo's sockets takes a few hundred microseconds, most of the time of a small collective between
ranks that share cores. Here every rank has one POSIX semaphore for each other rank. At a meeting it posts to
all other ranks and waits for a post from each of them; posts of a fast rank for the next meeting are counted,
not lost. Semaphores order memory accesses: what a rank wrote before a meeting is visible to others after it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from collections import deque
from collections.abc import Sequence
from itertools import product
from typing import Protocol

import torch
import torch.distributed as dist

#: Bytes kept for one ``sem_t``; 32 in glibc, 16 in musl.
SIZE = 64
#: Number of polls before sleeping, with a yield of the core after each: ranks that share a core meet
#: without a wake-up by the kernel.
LOOKS = 20

#: Seconds between polls if the C library cannot wait on the monotonic clock.
NAP = 0.0005

_libc = ctypes.CDLL(None, use_errno=True)
#: Whether the C library can; glibc before 2.30 and musl cannot.
SLEEPS = hasattr(_libc, "sem_clockwait")


class Meeting(Protocol):
    """Lets the ranks of a group wait for one another."""

    def announce(self) -> None:
        """Tell every other rank that this one has come, without waiting."""
        ...

    def wait(self) -> None:
        """Return when every rank has announced itself as often as this one has waited."""
        ...

    def meet(self) -> None:
        """Announce this rank and wait for the others."""
        self.announce()
        self.wait()


def open_meeting(shared: mmap.mmap, begin: int, group: dist.ProcessGroup, timeout: float) -> Meeting:
    """Return a barrier in memory that all ranks have mapped, or one over gloo if it fails. Collective.

    It is over gloo as well where torch.distributed checks every collective (``DebugLevel.DETAIL``), which it
    cannot do for the other kind.
    """
    ranks = dist.get_process_group_ranks(group)
    rank = ranks.index(dist.get_rank())
    barrier = HostBarrier(shared, begin, rank, ranks, timeout)
    made: list[bool] = [False] * len(ranks)
    wanted = dist.get_debug_level() != dist.DebugLevel.DETAIL
    dist.all_gather_object(made, wanted and (rank > 0 or barrier.make()), group=group)
    return barrier if all(made) else GlooMeeting(group)


class GlooMeeting(Meeting):
    """Meetings through the process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._tokens: deque[dist.Work] = deque()

    def announce(self) -> None:
        """Begin an all-reduce of one number."""
        token = dist.all_reduce(torch.zeros(1), group=self.group, async_op=True)
        assert token is not None
        self._tokens.append(token)

    def wait(self) -> None:
        """Wait for the oldest all-reduce that was begun."""
        self._tokens.popleft().wait()


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class HostBarrier(Meeting):
    """Meetings of the ranks of one group. Each rank may announce itself first and wait later."""

    def __init__(
        self, shared: mmap.mmap, begin: int, rank: int, names: Sequence[int], timeout: float
    ) -> None:
        """Take part as the group's ``rank``.

        Args:
            shared: memory that all members have mapped.
            begin: offset in ``shared`` of this barrier's :meth:`size` bytes.
            rank: this process's rank in the group.
            names: the members' ranks in the run, for errors.
            timeout: seconds to wait for a rank before an error is raised.
        """
        self.names, self.timeout = names, timeout
        self._lost = ""
        """Error text after a failed meeting, else empty: counts of ranks then differ, so none can follow."""
        self._memory = (ctypes.c_char * self.size(len(names))).from_buffer(shared, begin)
        self._others = [other for other in range(len(names)) if other != rank]
        self._out = [self._semaphore(other, rank) for other in self._others]
        self._in = [self._semaphore(rank, other) for other in self._others]

    @staticmethod
    def size(ranks: int) -> int:
        """Return the bytes of shared memory that a barrier of ``ranks`` ranks needs."""
        return SIZE * ranks * ranks

    def make(self) -> bool:
        """Initialize every semaphore, on one rank before any announces itself; False if there are none."""
        ranks = range(len(self.names))
        return all(_libc.sem_init(self._semaphore(*pair), 1, 0) == 0 for pair in product(ranks, ranks))

    def announce(self) -> None:
        """Tell every other rank that this one has come, without waiting.

        Raises:
            TimeoutError: an earlier meeting failed.
        """
        if self._lost:
            raise TimeoutError(self._lost)
        for semaphore in self._out:
            _libc.sem_post(semaphore)

    def wait(self) -> None:
        """Return when every rank has announced itself as often as this one has waited.

        Raises:
            TimeoutError: a rank did not come in time.
        """
        for other, semaphore in zip(self._others, self._in, strict=True):
            if not self._arrived(semaphore):
                self._sleep(other, semaphore)

    def _arrived(self, semaphore: ctypes.c_void_p) -> bool:
        for _ in range(LOOKS):
            if _libc.sem_trywait(semaphore) == 0:
                return True
            os.sched_yield()
        return False

    def _sleep(self, other: int, semaphore: ctypes.c_void_p) -> None:
        """Wait by the monotonic clock, since the wall clock may be changed."""
        until = time.monotonic() + self.timeout
        while not _wait_until(semaphore, until):
            if time.monotonic() >= until:
                rank, limit = self.names[other], f"{self.timeout:g} seconds"
                self._lost = f"rank {rank} did not come to a meeting within {limit}"
                raise TimeoutError(self._lost)

    def _semaphore(self, owner: int, other: int) -> ctypes.c_void_p:
        """Return where ``owner`` waits for ``other``."""
        return ctypes.c_void_p(ctypes.addressof(self._memory) + SIZE * (owner * len(self.names) + other))


def _wait_until(semaphore: ctypes.c_void_p, until: float) -> bool:
    """Wait until ``until`` (monotonic clock), or a signal, at most; return whether there was a post."""
    if not SLEEPS:
        time.sleep(NAP)
        return bool(_libc.sem_trywait(semaphore) == 0)
    deadline = _Timespec(int(until), int(until % 1 * 1e9))
    if _libc.sem_clockwait(semaphore, time.CLOCK_MONOTONIC, ctypes.byref(deadline)) == 0:
        return True
    problem = ctypes.get_errno()
    if problem not in (errno.ETIMEDOUT, errno.EINTR):
        raise OSError(problem, os.strerror(problem))
    return False
