"""Sends each rank's snapshot to one rank, overlapped with training, over the hosts' network."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nanotrain_memory_snapshots.seal import Moment
from nanotrain_memory_snapshots.slot import Slot

#: Tags of messages between ranks: sizes, seal, bytes.
SIZES, SEAL, BYTES = range(3)


def host() -> str:
    """Return what identifies this rank's host: launchers on one machine count as several hosts."""
    node = os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID") or ""
    return f"{socket.gethostname()}/{node}"


def distance(hosts: Sequence[str]) -> int:
    """Return the smallest ring distance at which every rank's neighbor is on another host.

    If there is none, the neighbor is the next rank.

    Args:
        hosts: of each rank.
    """
    ranks = len(hosts)
    for step in range(1, ranks):
        if all(hosts[rank] != hosts[(rank + step) % ranks] for rank in range(ranks)):
            return step
    return 1


def make_group(timeout: timedelta) -> Any:
    """Create the group for snapshots: a gloo group, since they are in the hosts' memory. Collective."""
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.OFF)  # at level DETAIL, torch would wait for all ranks in each call
    try:
        return dist.new_group(backend="gloo", timeout=timeout, group_desc="memory_snapshots")
    finally:
        dist.set_debug_level(level)


def send(group: Any, to: int, text: bytes, payload: torch.Tensor) -> list[tuple[Any, torch.Tensor]]:
    """Begin to send a sealed snapshot, or with an empty ``text`` a message that there is none.

    Returns:
        The pending sends, each with its memory.
    """
    sizes = torch.tensor([len(text), len(payload) if text else 0])
    parts = [(SIZES, sizes)]
    if text:
        parts += [(SEAL, torch.frombuffer(bytearray(text), dtype=torch.uint8)), (BYTES, payload)]
    return [(dist.isend(part, to, group=group, tag=tag), part) for tag, part in parts]


def receive(group: Any, source: int, slot: Slot, moment: Moment) -> bool:
    """Receive a snapshot into ``slot`` and seal it; return whether there was one.

    Args:
        group: of :func:`make_group`.
        source: the rank that sends.
        slot: destination.
        moment: the expected moment.
    """
    sizes = torch.zeros(2, dtype=torch.int64)
    dist.recv(sizes, source, group=group, tag=SIZES)
    length, nbytes = sizes.tolist()
    if not length:
        return False
    text = torch.empty(length, dtype=torch.uint8)
    dist.recv(text, source, group=group, tag=SEAL)
    dist.recv(slot.begin(nbytes), source, group=group, tag=BYTES)
    slot.close(text.numpy().tobytes(), moment)
    return True


def wait(works: Sequence[tuple[Any, torch.Tensor]]) -> None:
    """Wait until everything has been sent."""
    for work, _ in works:
        work.wait()
