"""A barrier for processes of one host, in memory they share: a meeting costs microseconds.

gloo's sockets take a few hundred microseconds to say "I am here", which is most of the time of a small
collective between ranks that share cores. Here every rank has one POSIX semaphore per other rank. To
meet, it posts its own at everybody and waits for everybody's: what a fast rank posts for the next meeting
adds up and is not lost. A semaphore orders memory, so what a rank wrote before is visible after.
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
#: Times to look and let others run, before going to sleep: ranks that share a core meet without the
#: kernel waking anybody.
LOOKS = 20

#: Seconds between looks where the C library cannot sleep by a clock that nobody sets.
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
    """Return a barrier in memory that all ranks have mapped, or else one of gloo's. Collective.

    gloo's serves too where torch.distributed compares every collective (``DebugLevel.DETAIL``): it could
    not see the other.
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
        """Begin to sum a number."""
        token = dist.all_reduce(torch.zeros(1), group=self.group, async_op=True)
        assert token is not None
        self._tokens.append(token)

    def wait(self) -> None:
        """Return when the sum is there."""
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
            begin: where the :meth:`size` bytes for this begin in it.
            rank: this process's in the group.
            names: the members' ranks in the run, for errors.
            timeout: seconds until a rank that did not come is given up.
        """
        self.names, self.timeout = names, timeout
        self._lost = ""
        """Why there can be no more meetings: after one that failed, counts differ between ranks for good."""
        self._memory = (ctypes.c_char * self.size(len(names))).from_buffer(shared, begin)
        self._others = [other for other in range(len(names)) if other != rank]
        self._out = [self._semaphore(other, rank) for other in self._others]
        self._in = [self._semaphore(rank, other) for other in self._others]

    @staticmethod
    def size(ranks: int) -> int:
        """Return the bytes that so many ranks have to share."""
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
        """Wait by the clock that nobody sets: a wall clock may jump."""
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
    """Return whether somebody posted; false at ``until``, of the monotonic clock, or at a signal."""
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
