"""Connects restarted ranks with each other and with earlier attempts, which no single host knows.

A launcher counts only failures of its own ranks: a restart caused by another host is not counted, and the
launcher of a replaced host has no history. torchrun keeps one store for all attempts, so keys of a failed
attempt are still there; rank 0 uses that to leave a :class:`LaunchHistory` for later attempts.
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

#: Key of the :class:`LaunchHistory` that rank 0 of an attempt stores for later attempts with the same store.
HISTORY = "history"


@attrs.frozen(kw_only=True)
class LaunchHistory:
    """What this launch has done before its ranks were started for this attempt."""

    began: bool = False
    """Whether its ranks were started before."""
    saved: bool = False
    """Whether it has written a checkpoint of its own."""
    folder: str | None = None
    """The run folder, if a launcher remembers it."""
    failed_at: float | None = None
    """When a launcher detected the last failure of its own ranks, in seconds since the epoch."""
    agents: Sequence[str] = ()
    """Names of torchrun's agents, those that have joined it now included."""

    def failure(self) -> str | None:
        """Return :attr:`failed_at` as text, empty if unknown; None if there was no earlier attempt."""
        return f"{self.failed_at or ''}" if self.began else None


def exchange_histories(
    store: Store, rank: int, world_size: int, mine: LaunchHistory, *, timeout: float
) -> tuple[Store, LaunchHistory]:
    """Return ``store`` under a new prefix, and on rank 0 the combined :class:`LaunchHistory` of all hosts.

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
    left = [LaunchHistory(**json.loads(store.get(HISTORY)))] if store.check([HISTORY]) else []
    histories = [mine, *left, *(_answer(store, other, token, timeout) for other in range(1, world_size))]
    return PrefixStore(token, store), _joined(histories)


def remember(part: Store, folder: str) -> None:
    """Store this launch's :class:`LaunchHistory` for later attempts, outside the ``part`` of this attempt."""
    from torch.distributed import PrefixStore

    assert isinstance(part, PrefixStore)
    part.underlying_store.set(HISTORY, json.dumps({"began": True, "folder": folder}))


def _answer(store: Store, rank: int, part: str, timeout: float) -> LaunchHistory:
    """Send ``rank`` of this attempt the name of its part of the store; return the history that it sent."""
    deadline = time.monotonic() + timeout
    text = f"rank {rank} has not come within {timeout:g} seconds of rank 0"
    wait_for(store, f"call/{rank}", deadline, text)
    for _ in tries(deadline, text):  # a call of an earlier attempt may be there until this one's comes
        token, history = json.loads(store.get(f"call/{rank}"))
        store.set(f"answer/{token}", part)
        if store.check([f"{part}/met/{rank}"]):
            break
    return LaunchHistory(**history)


def _joined(histories: Sequence[LaunchHistory]) -> LaunchHistory:
    return LaunchHistory(
        began=any(each.began for each in histories),
        saved=any(each.saved for each in histories),
        folder=next((each.folder for each in histories if each.folder is not None), None),
        agents=tuple(sorted({agent for each in histories for agent in each.agents})),
        failed_at=max((each.failed_at for each in histories if each.failed_at is not None), default=None),
    )
