"""All ranks compare what they will run, before their first collective could hang or give wrong results."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nanotrain_core.errors import Exit, FolderError, LaunchError, NanotrainError
from nanotrain_core.launch.cause import PeerLostError
from nanotrain_core.launch.environment import Ranks
from nanotrain_core.launch.store_waits import wait_for
from nanotrain_core.run.folder_owner import LOCK

if TYPE_CHECKING:
    from torch.distributed import Store

#: Before the keys of the recipe in the names of facts.
OF_RECIPE = "the recipe's "
#: How facts begin in which two runs of one name may differ.
_OF_RUN = (OF_RECIPE, "--resume", "--folder")


def agree(store: Store, rank: int, world_size: int, facts: Mapping[str, str | None]) -> None:
    """Compare ``facts`` (versions, digests of code, the recipe's values) with rank 0's on every rank.

    A fact that is None on either is not compared.

    Raises:
        LaunchError: on every rank, naming the first rank that differs and in what.
    """
    store.set(f"facts/{rank}", json.dumps({**facts, "host": socket.gethostname()}))
    if rank == 0:
        store.set("verdict", _verdict(store, world_size))
    verdict = _told(0, store, "verdict").decode()
    if verdict == "equal":
        return
    wait_until_read("verdict", store, rank, world_size)
    raise LaunchError(verdict)


def wait_until_read(key: str, store: Store, rank: int, world_size: int) -> None:
    """Announce that this rank has read ``key``; rank 0 waits for the others, as the store may end with it."""
    store.set(f"heard/{key}/{rank}", "yes")
    if rank == 0:
        with contextlib.suppress(RuntimeError, PeerLostError):  # one that never arrives
            for other in range(1, world_size):
                _told(other, store, f"heard/{key}/{other}")


def _told(rank: int, store: Store, key: str) -> bytes:
    """Return what a rank stores within the store's timeout; rank 0, which may wait itself, has twice that."""
    seconds = store.timeout.total_seconds() * (1 if rank else 2)  # type: ignore[attr-defined]
    why = "" if rank else ": it may wait for others"
    text = f"rank {rank} has not told its {key.partition('/')[0]!r} within {seconds:g} seconds{why}"
    return wait_for(store, key, time.monotonic() + seconds, text)


def _verdict(store: Store, world_size: int) -> str:
    mine = json.loads(store.get("facts/0"))
    for rank in range(1, world_size):
        theirs = json.loads(_told(rank, store, f"facts/{rank}"))
        for fact in sorted({*mine, *theirs} - {"host"}):
            here, there = mine.get(fact, "missing"), theirs.get(fact, "missing")
            if here != there and None not in (here, there):
                run_id = os.environ.get("TORCHELASTIC_RUN_ID") if fact.startswith(_OF_RUN) else None
                two = f"; two runs at one endpoint need two --rdzv-id, both have {run_id}" if run_id else ""
                who = f"rank {rank} on {theirs['host']} does not run what rank 0 on {mine['host']} runs"
                what = f"{there} there and {here} on rank 0"
                return f"{who}: {fact} is {what}{two}"
    return "equal"


def broadcast_from_rank_0(
    decide: Callable[[], str | None], key: str, ranks: Ranks, store: Store | None
) -> str | None:
    """Return the decision of rank 0, which reads the disk for all ranks; raise its error on every rank."""
    if ranks.rank != 0:
        assert store is not None
        said: tuple[str | None, str | None, int] = json.loads(_told(0, store, key))
        if said[1] is not None:
            wait_until_read(key, store, ranks.rank, ranks.world_size)
            raise NanotrainError(said[1]).with_code(said[2])
        return said[0]
    decision, problem = None, None
    try:
        decision = decide()
    except NanotrainError as error:
        problem = error
    if store is not None:
        why = (None, Exit.DONE) if problem is None else (str(problem), problem.exit_code)
        store.set(key, json.dumps([decision, *why]))
        if problem is not None:
            wait_until_read(key, store, ranks.rank, ranks.world_size)
    if problem is not None:
        raise problem
    return decision


def expect_shared(folder: Path, claim: str, ranks: Ranks, store: Store, patience: float) -> None:
    """Check on every rank that all hosts see the run folder that rank 0 has claimed.

    With a folder of their own they would have no checkpoints where rank 0 has some: who is rank 0 depends on
    which host comes first, and the run would begin anew.

    Args:
        folder: the run folder.
        claim: what rank 0 has written to its lock file.
        ranks: of this process.
        store: of the ranks.
        patience: seconds to look again.

    Raises:
        FolderError: a host does not see it; on rank 0. The others raise its error.
    """
    if ranks.rank > 0:
        sees = ranks.local_rank > 0 or _sees(folder / LOCK, claim, patience)  # one rank of a host looks
        where = f"{folder.absolute()} on {socket.gethostname()}"  # one path may be relative to two folders
        store.set(f"sees/{ranks.rank}", "" if sees else where)

    def all_see() -> None:
        for rank in range(1, ranks.world_size):
            if where := _told(rank, store, f"sees/{rank}").decode():
                own = f"{folder.absolute()} on {socket.gethostname()}"
                raise FolderError(
                    f"rank {rank} does not find rank 0's run folder, {own}, as {where}: "
                    "all hosts need one shared folder, under the same path"
                )

    broadcast_from_rank_0(all_see, "seen", ranks, store)


def _sees(path: Path, text: str, patience: float) -> bool:
    """Return whether a file has that text, now or within ``patience`` seconds."""
    until = time.monotonic() + patience
    while True:
        try:
            if path.read_text(encoding="utf-8") == text:
                return True
        except PermissionError:  # a lock on SMB excludes reading: the file is there, and locked
            if path.exists():
                return True
        except OSError:
            pass
        if time.monotonic() > until:
            return False
        time.sleep(0.5)
