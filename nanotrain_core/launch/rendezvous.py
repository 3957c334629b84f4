"""Rendezvous of ranks that another launcher started, at a port that may be in use by another run."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from nanotrain_core.errors import LaunchError
from nanotrain_core.launch.environment import Ranks, agent_serves_store, rendezvous_address, run_name

if TYPE_CHECKING:
    from torch.distributed import Store

#: Number of ports to try after the first, if none was specified.
MORE_PORTS = 15
#: Seconds to wait for an answer at a port: rank 0's store answers within them, other programs do not.
_SOON = timedelta(seconds=5)
#: Seconds until a port that did not answer is tried again.
LATER = 60.0
#: Time for a store to answer where there is no other port to try, as on hosts under load.
PATIENT = timedelta(seconds=30)


def rendezvous_store(ranks: Ranks, seconds: float, *, launched: bool = False) -> Store:
    """Return the TCP store through which all ranks of a run meet.

    Args:
        ranks: this rank's place in the world.
        seconds: to wait for the others, and the store's timeout from then on.
        launched: whether `nanotrain run` started these ranks on each host, which was given the address.
            Otherwise rank 0 takes a free port if none was specified, and the others search for it.

    Raises:
        LaunchError: no address is set, no port is free, or rank 0 was not found in time.
    """
    import torch.distributed as dist

    host, port = rendezvous_address(ranks)
    limit, agents = timedelta(seconds=seconds), agent_serves_store()
    if agents or launched:
        serves = ranks.rank == 0 and not agents
        return dist.TCPStore(host, port, ranks.world_size, is_master=serves, timeout=limit)
    ports = candidates(port, named="MASTER_PORT" in os.environ)
    name = run_name(ranks)
    if ranks.rank:
        return find(host, ports, name, seconds)
    store = serve(host, ports, name)
    store.set_timeout(limit)
    return store


def candidates(port: int, *, named: bool) -> list[int]:
    """Return the ports to try: only the ``named`` one if specified."""
    return [port] if named else [*range(port, port + 1 + MORE_PORTS)]


def serve(host: str, ports: Sequence[int], name: str) -> Store:
    """Return the store of a run called ``name``, served by this process, which is rank 0.

    Raises:
        LaunchError: all ports are in use.
    """
    import torch.distributed as dist

    for port in ports:
        if _listens(host, port):
            continue
        with contextlib.suppress(RuntimeError):  # taken meanwhile
            store = dist.TCPStore(host, port, is_master=True, timeout=_SOON, wait_for_workers=False)
            store.set(f"run/{name}", "")
            return store
    known = f"port {ports[0]}" if len(ports) == 1 else f"ports {ports[0]} to {ports[-1]}"
    text = "where the ranks would meet, cannot be had: set MASTER_PORT to a free one"
    raise LaunchError(f"{known} of {host}, {text}")


def find(host: str, ports: Sequence[int], name: str, seconds: float) -> Store:
    """Return the store that rank 0 serves under ``name``, once it does. Other programs' ports are skipped.

    Raises:
        LaunchError: it has not appeared within this many seconds.
    """
    until, silent = time.monotonic() + seconds, dict.fromkeys(ports, 0.0)
    while time.monotonic() < until:
        for port in ports:
            if time.monotonic() < silent[port] or not _listens(host, port):
                continue
            looking = _Look(host, port, f"run/{name}", _SOON)
            if looking.found is not None:
                looking.found.set_timeout(timedelta(seconds=seconds))
                return looking.found
            if looking.is_alive():
                silent[port] = time.monotonic() + LATER
        time.sleep(0.2)
    text = "it has not started there, or another program has the port: set MASTER_PORT to a free one"
    raise LaunchError(
        f"rank 0 has not been found at {host}, port {ports[0]}, within {seconds:g} seconds: {text}"
    )


def is_held_by_another_program(host: str, port: int) -> bool:
    """Return whether a program listens at a port and is no store. Torch would wait for it forever.

    One that closes the connection may be a forwarder whose host does not listen yet: torch tries again.
    """
    if not _listens(host, port) or _Look(host, port, "", PATIENT).found is not None:
        return False
    return _keeps_connection(host, port) and _Look(host, port, "", _SOON).found is None  # it may be late


class _Look(threading.Thread):
    """Probes a port, in a thread because torch may wait forever for another program that sends nothing."""

    def __init__(self, host: str, port: int, key: str, limit: timedelta) -> None:
        """Wait up to ``limit`` for a store that has the ``key``, any store if it is empty."""
        super().__init__(daemon=True)
        self.host, self.port, self.key, self.limit = host, port, key, limit
        self.found: Store | None = None
        self.start()
        self.join(limit.total_seconds())

    def run(self) -> None:
        import torch.distributed as dist

        with contextlib.suppress(RuntimeError):  # not a store, or it is gone
            there = dist.TCPStore(
                self.host, self.port, is_master=False, timeout=self.limit, wait_for_workers=False
            )
            self.found = there if not self.key or there.check([self.key]) else None


def _keeps_connection(host: str, port: int) -> bool:
    """Return whether a program listens and does not close a connection at once."""
    soon = _SOON.total_seconds()
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=soon) as one:
        try:
            return bool(one.recv(1))
        except TimeoutError:
            return True
    return False


def _listens(host: str, port: int) -> bool:
    """Return whether any process listens."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=_SOON.total_seconds()):
        return True
    return False
