"""The first cause of a failure on any host, reported on all: other hosts only see that a rank is gone."""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING

import attrs

from nanotrain_core.errors import Exit
from nanotrain_core.launch.cause import Cause

if TYPE_CHECKING:
    from torch.distributed import Store

#: Seconds that a launcher waits for the causes of the others, and for them to read that it ends the run.
PATIENCE = 5.0


def another_has_failed(store: Store, host: int, hosts: int) -> bool:
    """Return whether a launcher of another host has reported a cause in this attempt."""
    with contextlib.suppress(RuntimeError):  # the host that serves the store is gone
        return any(store.check([f"cause/{other}"]) for other in range(hosts) if other != host)
    return True


def first_of_all(mine: Cause, store: Store, host: int, hosts: int) -> Cause:
    """Return the first cause among those of all launchers; ``mine`` if none is better within seconds.

    Echoes count only if there is nothing else. Among them a hang is first: ranks that it has ended are gone
    for the others.

    Args:
        mine: of this host.
        store: of the launchers, for this attempt only.
        host: index of this host.
        hosts: number of hosts.
    """
    found: dict[int, tuple[float, Cause]] = {host: (time.time(), mine)}
    until = time.monotonic() + PATIENCE
    with contextlib.suppress(RuntimeError):  # the host that serves the store is gone
        store.set(f"cause/{host}", json.dumps([time.time(), attrs.asdict(mine)]))
        while len(found) < hosts and time.monotonic() < until:
            for other in range(hosts):
                if other not in found and store.check([f"cause/{other}"]):
                    when, fields = json.loads(store.get(f"cause/{other}"))
                    found[other] = (when, Cause(**fields))
            if not mine.echo and any(
                not cause.echo for number, (_, cause) in found.items() if number != host
            ):
                break
            time.sleep(0.1)
    known = sorted(
        (cause.echo, when, number)
        for number, (when, cause) in found.items()
        if not cause.echo or cause.code == Exit.HUNG
    )
    return found[known[0][2]][1] if known else mine


def announce_end(cause: Cause, store: Store, host: int, hosts: int) -> None:
    """Tell the other launchers that this one ends the run, and why; wait seconds at most until they know.

    This host may serve the store. To launchers that find it gone, a run that has ended for good and a host
    that may come back are the same.
    """
    with contextlib.suppress(RuntimeError):  # the host that serves the store is gone
        store.compare_set("over", "", json.dumps(attrs.asdict(cause)))
        announced_end(store, host)
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until and not store.check([f"knows/{other}" for other in range(hosts)]):
            time.sleep(0.1)


def announced_end(store: Store, host: int) -> Cause | None:
    """Return why a launcher has ended the run; None if none has, or the store is gone."""
    with contextlib.suppress(RuntimeError):
        if store.check(["over"]):
            store.set(f"knows/{host}", "")
            return Cause(**json.loads(store.get("over")))
    return None
