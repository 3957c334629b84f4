"""Messages from one rank to another of the same host, through memory that they share.

gloo uses a separate thread on either side of a message, which competes for a core with the thread that
computes: between busy ranks a message takes up to milliseconds, while copying it takes about 30 us.

A channel goes one way and has a slot for every message of a step. One semaphore counts what was written,
another what was read.
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from nanotrain_cpu.barrier import HostBarrier
from nanotrain_cpu.shared_memory import map_for_all

#: Bytes of a channel: a step with larger messages, or more of them, uses another way.
CHANNEL = 2**22
#: Bytes ahead of each message, for its step, number and form; slots begin at a multiple of it.
STAMP = 64

#: What a channel is for: a way and an edge between stages.
Key = tuple[str, int]
#: Ranks in a group: the sender and the receiver of each channel.
Ends = Mapping[Key, Sequence[int]]


class Channel:
    """One end of a channel. Both ends must pass the same messages, in the same order."""

    def __init__(self, memory: mmap.mmap, start: int, barrier: HostBarrier) -> None:
        """``start``: where it begins in ``memory``; ``barrier``: of the sender and the receiver."""
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8, count=CHANNEL, offset=start)
        self.barrier = barrier
        self._step = self._turn = self._unread = self._slot = 0

    def begin(self, messages: int) -> None:
        """Begin a step with at most so many messages. Collective over both ends."""
        self._step, self._turn = self._step + 1, 0
        self._slot = CHANNEL // messages // STAMP * STAMP

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a slot is large enough."""
        return STAMP + tensor.nbytes <= self._slot

    def send(self, tensor: torch.Tensor, number: int) -> None:
        """Write a message to the next slot; wait only until an earlier step's was read."""
        while self._unread > self._turn:
            self.barrier.wait()
            self._unread -= 1
        stamp, content = self._next(tensor)
        stamp.copy_(torch.tensor([self._step, number, _form_of(tensor)]))
        content.copy_(tensor)
        self._unread += 1
        self.barrier.announce()

    def receive(self, into: torch.Tensor, number: int) -> None:
        """Wait for the next message, and copy it.

        Raises:
            RuntimeError: it is one of a step that was broken off, or not the one of this ``number``, or has
                another shape or dtype than ``into``.
        """
        self.barrier.wait()
        stamp, content = self._next(into)
        step, sent, form = stamp.tolist()
        if step != self._step:
            raise RuntimeError("a step that was broken off left messages behind: start these ranks again")
        if sent != number:
            text = f"microbatch {number} was expected from another stage and {sent} came"
            raise RuntimeError(f"{text}: the schedule does not run them in one order at both ends")
        if form != _form_of(into):
            expected = f"{list(into.shape)} of {into.dtype}"
            raise RuntimeError(f"another stage sent something else than the {expected} that it did at first")
        into.copy_(content)
        self.barrier.announce()

    def _next(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return stamp and content of the next slot."""
        slot = self.bytes[self._turn * self._slot :]
        self._turn += 1
        content = slot[STAMP : STAMP + like.nbytes].view(like.dtype).view(like.shape)
        return slot[:24].view(torch.int64), content


def _form_of(tensor: torch.Tensor) -> int:
    """Return a number for shape and dtype, the same in every process."""
    return zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode())


def open_channels(ends: Ends, group: dist.ProcessGroup, timeout: float) -> dict[Key, Channel]:
    """Return this rank's ends of channels; empty on every rank if channels are not possible. Collective.

    They are not possible between hosts, without shared memory, and where torch.distributed checks messages
    between ranks (``DebugLevel.DETAIL``), which it cannot do for these.

    Args:
        ends: of every channel, in the same order on every rank.
        group: on the CPU.
        timeout: seconds until a rank that does not come is given up.
    """
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        return {}
    names, mine = dist.get_process_group_ranks(group), dist.get_rank(group)
    sent = [[key for key, (sender, _) in ends.items() if sender == rank] for rank in range(len(names))]
    each = CHANNEL + HostBarrier.size(2)
    maps = map_for_all(each * max(map(len, sent)), group)
    if maps is None:
        return {}
    found, made = {}, [True] * len(names)
    for key, pair in ends.items():
        if mine in pair:
            memory, start = maps[pair[0]], sent[pair[0]].index(key) * each
            both = [names[rank] for rank in pair]
            barrier = HostBarrier(memory, start + CHANNEL, pair.index(mine), both, timeout)
            made[mine] &= pair[1] == mine or barrier.make()
            found[key] = Channel(memory, start, barrier)
    dist.all_gather_object(made, made[mine], group=group)
    return found if all(made) else {}
