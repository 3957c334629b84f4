"""The hosts of a run, and the rendezvous of their launchers.

On one host it is a file. Several hosts use a store which the host of the endpoint serves.
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from nanotrain_core.errors import Exit, LaunchError
from nanotrain_core.launch.environment import is_port
from nanotrain_core.launch.rendezvous import is_held_by_another_program
from nanotrain_core.run import log

if TYPE_CHECKING:
    from torch.distributed import Store
    from torch.distributed.elastic.rendezvous import RendezvousHandler

#: Seconds that hosts wait for the one that serves the rendezvous: clusters start some much later.
MEETING = 600
#: Seconds to wait for more hosts once the minimum number of them is present.
LAST_CALL = 30
#: Key of the endpoint's store: the number of launchers that have written their run ids next to it.
RUNS = "nanotrain/runs"


@attrs.define(frozen=True, kw_only=True)
class Nodes:
    """The hosts of a run."""

    count: int = 1
    """Maximum number of hosts."""
    least: int = 0
    """Minimum number of hosts to begin, or to continue when others are gone; 0: all of them."""
    nproc: int = 1
    """Ranks per host."""
    endpoint: str = ""
    """``host:port`` of the rendezvous."""
    run_id: str = "nanotrain"
    """By which launchers at one endpoint meet: by default only the run's name, so that hosts whose command
    lines differ otherwise meet and are refused. With ids of their own each could train alone."""
    max_restarts: int = 0

    @property
    def local_address(self) -> str | None:
        """The address at which other hosts reach this host's ranks: None makes torch find it."""
        return "127.0.0.1" if self.count == 1 else None

    def can_continue_without_this_host(self) -> bool:
        """Return whether fewer hosts are enough, and the rendezvous is not on this one."""
        fewer = 0 < self.least < self.count
        return fewer and not is_here(self.endpoint.rpartition(":")[0].strip("[]"))

    def check(self) -> None:
        """Reject several hosts that could not find each other.

        Raises:
            LaunchError: there is no endpoint, or it is invalid.
        """
        if self.count > 1 and not self.endpoint:
            raise LaunchError("--nnodes above 1 needs --rdzv-endpoint HOST:PORT, the same on every node")
        host, _, port = self.endpoint.rpartition(":")
        if self.endpoint and not (host and is_port(port)):
            raise LaunchError(f"--rdzv-endpoint {self.endpoint}: expected HOST:PORT, for example node1:29400")


def is_here(host: str) -> bool:
    """Return whether ``host`` has an address of this machine, one that a socket can be bound to."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, (address, *_) in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as one:
                one.bind((address, 0))
                return True
    return False


def rendezvous(nodes: Nodes, scratch: Path) -> RendezvousHandler:
    """Return this launcher's rendezvous. With several hosts, this connects to the endpoint.

    Args:
        nodes: the hosts.
        scratch: this launcher's private folder, for the rendezvous file of a single host.

    Raises:
        LaunchError: the rendezvous host does not answer within :data:`MEETING` seconds, or another program
            has the port.
    """
    from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    single = nodes.count == 1
    host, _, port = nodes.endpoint.rpartition(":")
    if not single and is_held_by_another_program(host.strip("[]"), int(port)):
        raise LaunchError(f"port {port} of {host} is held by another program: choose another --rdzv-endpoint")
    more = {"store_type": "file"} if single else {"read_timeout": MEETING, "last_call_timeout": LAST_CALL}
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=str(scratch / "rendezvous") if single else nodes.endpoint,
        run_id=nodes.run_id,
        min_nodes=nodes.least or nodes.count,
        max_nodes=nodes.count,
        local_addr=nodes.local_address,
        **more,
    )
    try:
        handler = get_rendezvous_handler(parameters)
        if not single:
            _tell_of_others(nodes, handler._store)  # type: ignore[attr-defined]
        return handler
    except RendezvousError as problem:
        error = LaunchError(f"the hosts of the run cannot meet at {nodes.endpoint}: {problem}")
        raise error.with_code(Exit.FAILED) from None  # not a user error: the first host may be late


def _tell_of_others(nodes: Nodes, store: Store) -> None:
    """Warn if launchers with another run id have used the store of an endpoint: they do not meet this one."""
    with contextlib.suppress(RuntimeError):  # the host that serves it is gone, which the rendezvous notices
        number = store.add(RUNS, 1)
        store.set(f"{RUNS}/{number}", nodes.run_id)
        earlier = (f"{RUNS}/{other}" for other in range(1, number))
        known = {store.get(key).decode() for key in earlier if store.check([key])} - {nodes.run_id}
        if known:
            others = (
                f"{nodes.endpoint} serves another run, {', '.join(sorted(known))}; this is {nodes.run_id}"
            )
            one = "hosts of one run need the same run.name, or the same --rdzv-id"
            log.say(f"{others}: {one}; two runs should have two endpoints", level="warning")
