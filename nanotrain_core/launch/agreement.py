"""All ranks compare what they will run, before their first collective could hang or give wrong results."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Mapping
from typing import Any, Protocol

from nanotrain_core.errors import LaunchError


class Store(Protocol):
    """The subset of ``torch.distributed.Store`` used here."""

    def set(self, key: str, value: str) -> Any: ...

    def get(self, key: str) -> bytes: ...


def agree(store: Store, rank: int, world_size: int, facts: Mapping[str, str]) -> None:
    """Compare ``facts`` (versions, digests of code, a hash of the recipe) with rank 0's on every rank.

    Raises:
        LaunchError: on every rank, naming the first rank that differs and in what.
    """
    store.set(f"facts/{rank}", json.dumps({**facts, "host": socket.gethostname()}))
    if rank == 0:
        store.set("verdict", _verdict(store, world_size))
    verdict = store.get("verdict").decode()
    if verdict == "equal":
        return
    wait_until_read("verdict", store, rank, world_size)
    raise LaunchError(verdict)


def wait_until_read(key: str, store: Store, rank: int, world_size: int) -> None:
    """Announce that this rank has read ``key``; rank 0 waits for the others, as the store may end with it."""
    store.set(f"heard/{key}/{rank}", "yes")
    if rank == 0:
        with contextlib.suppress(RuntimeError):  # one that never arrives
            for other in range(world_size):
                store.get(f"heard/{key}/{other}")


def _verdict(store: Store, world_size: int) -> str:
    mine = json.loads(store.get("facts/0"))
    for rank in range(1, world_size):
        theirs = json.loads(store.get(f"facts/{rank}"))
        for fact in sorted({*mine, *theirs} - {"host"}):
            if mine.get(fact) != theirs.get(fact):
                return (
                    f"rank {rank} on {theirs['host']} does not run what rank 0 on {mine['host']} runs: "
                    f"{fact} is {theirs.get(fact, 'missing')} there and {mine.get(fact, 'missing')} on rank 0"
                )
    return "equal"
