"""Connects restarted ranks with each other and with earlier attempts, which no single host knows.

A launcher counts only failures of its own ranks: a restart caused by another host is not counted, and the
launcher of a replaced host has no history. torchrun keeps one store for all attempts, so keys of a failed
attempt are still there; rank 0 uses that to leave a :class:`Past` for later attempts.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from nanotrain_core.launch.store_waits import tries, wait_for

if TYPE_CHECKING:
    from torch.distributed import Store

#: Key under which rank 0 of an attempt stores a :class:`Past` for later attempts with the same store.
PAST = "past"


@attrs.frozen(kw_only=True)
class Past:
    """What this launch has done before its ranks were started for this attempt."""

    began: bool = False
    saved: bool = False
    """Whether it has written a checkpoint of its own."""
    folder: str | None = None
    """The run folder, if a launcher remembers it."""
    failed_at: float | None = None
    """When a launcher detected the last failure of its own ranks."""
    agents: Sequence[str] = ()
    """Names of torchrun's agents, those that have joined it now included."""

    def failure(self) -> str | None:
        """Return :attr:`failed_at` as text, empty if unknown; None if there was no earlier attempt."""
        return f"{self.failed_at or ''}" if self.began else None


def meet(store: Store, rank: int, world_size: int, mine: Past, *, timeout: float) -> tuple[Store, Past]:
    """Return ``store`` under a new prefix, and on rank 0 the combined :class:`Past` of all hosts.

    Every other rank publishes a unique token and waits for the answer under it; rank 0 repeats its answer,
    the prefix, until the rank has confirmed it. Keys of earlier attempts have other tokens, so they reach no
    rank.

    Args:
        store: a store that all ranks reach, used or new.
        rank: of this process.
        world_size: ranks that call.
        mine: what this rank's host knows.
        timeout: seconds that rank 0 waits for each of the others. They wait twice as long: rank 0 may come
            later than they do, and should then be the one that names a rank that does not come.

    Raises:
        PeerLostError: a rank did not arrive, or rank 0 did not answer.
    """
    from torch.distributed import PrefixStore

    token = uuid.uuid4().hex
    if rank != 0:
        store.set(f"call/{rank}", json.dumps([token, attrs.asdict(mine)]))
        text = f"rank 0 has not answered rank {rank} within {2 * timeout:g} seconds: it may wait for others"
        part = wait_for(store, f"answer/{token}", time.monotonic() + 2 * timeout, text).decode()
        store.set(f"{part}/met/{rank}", "")
        return PrefixStore(part, store), mine
    left = [Past(**json.loads(store.get(PAST)))] if store.check([PAST]) else []
    pasts = [mine, *left, *(_answer(store, other, token, timeout) for other in range(1, world_size))]
    return PrefixStore(token, store), _joined(pasts)


def remember(part: Store, folder: str) -> None:
    """Store this launch's :class:`Past` for later attempts, outside the ``part`` of this attempt."""
    from torch.distributed import PrefixStore

    assert isinstance(part, PrefixStore)
    part.underlying_store.set(PAST, json.dumps({"began": True, "folder": folder}))


def _answer(store: Store, rank: int, part: str, timeout: float) -> Past:
    """Send ``rank`` of this attempt the name of its part of the store; return the :class:`Past` it sent."""
    deadline = time.monotonic() + timeout
    text = f"rank {rank} has not come within {timeout:g} seconds of rank 0"
    wait_for(store, f"call/{rank}", deadline, text)
    for _ in tries(deadline, text):  # a call of an earlier attempt may be there until this one's comes
        token, past = json.loads(store.get(f"call/{rank}"))
        store.set(f"answer/{token}", part)
        if store.check([f"{part}/met/{rank}"]):
            break
    return Past(**past)


def _joined(pasts: Sequence[Past]) -> Past:
    return Past(
        began=any(past.began for past in pasts),
        saved=any(past.saved for past in pasts),
        folder=next((past.folder for past in pasts if past.folder is not None), None),
        agents=tuple(sorted({agent for past in pasts for agent in past.agents})),
        failed_at=max((past.failed_at for past in pasts if past.failed_at is not None), default=None),
    )
