"""Names, addresses and ports: what ranks need to find one another."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

from nanotrain_core.api.ranks import loopback
from nanotrain_doctor.findings import Finding, bad, good, note, warning

#: Returns the addresses of a name, or raises OSError.
Resolve = Callable[[str], list[str]]
#: Opens a listening socket at (address, port), 0 for any, and closes it again, or raises OSError.
Bind = Callable[[str, int], None]
HOSTS_FILE = "a line with its network address in /etc/hosts, or GLOO_SOCKET_IFNAME set to its interface"


def addresses_of(name: str) -> list[str]:
    """Return the addresses of a host, each once.

    Raises:
        OSError: nobody knows it.
    """
    return sorted({str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})


def listen_at(address: str, port: int) -> None:
    """Listen there for a moment.

    Raises:
        OSError: this host cannot.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, port))
        probe.listen()


def examine_network(*, hosts: int = 1, root: Path = Path("/")) -> list[Finding]:
    """Look at this host's name, its loopback interface and its ports; ``hosts`` is of the run."""
    return [host_name(hosts=hosts), local_ports(), port_range(root)]


def host_name(
    name: str | None = None, *, hosts: int = 1, resolve: Resolve = addresses_of, bind: Bind = listen_at
) -> Finding:
    """Judge the address under which gloo would tell other ranks to find this one.

    Ranks of one host go over loopback, so that a name that leads nowhere hurts with several hosts alone.
    """
    name = socket.gethostname() if name is None else name
    judged = bad if hosts > 1 else warning
    alone = "" if hosts > 1 else "; ranks of this host alone do not mind"
    try:
        found = resolve(name)
    except OSError as problem:
        text = f"{name} has no address ({problem.strerror or problem}){alone}"
        return judged("host name", text, HOSTS_FILE, name=name, addresses=[])
    values = {"name": name, "addresses": found}
    if all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found):
        text = f"{name} is {', '.join(found)}, which every host is to itself{alone}"
        return judged("host name", text, HOSTS_FILE, **values)
    elsewhere = [address for address in found if not _can(bind, address)]
    if elsewhere:
        text = f"{name} is {', '.join(found)}, but {', '.join(elsewhere)} is no address of this host{alone}"
        return judged("host name", text, HOSTS_FILE, **values)
    return good("host name", f"{name} is {', '.join(found)}", **values)


def local_ports(bind: Bind = listen_at, interface: Callable[[], str | None] = loopback) -> Finding:
    """Judge whether ranks of one host can listen for one another."""
    if interface() is None:
        return bad("loopback", "there is no interface lo", "ip link set lo up; in a sandbox, allow it")
    try:
        bind("127.0.0.1", 0)
    except OSError as problem:
        text = f"cannot listen at 127.0.0.1: {problem.strerror}"
        return bad("loopback", text, "allow sockets on loopback (a sandbox, a firewall, seccomp)")
    return good("loopback", "ranks of this host can meet")


def examine_endpoint(text: str, *, resolve: Resolve = addresses_of, bind: Bind = listen_at) -> Finding:
    """Judge ``HOST:PORT`` where hosts are to meet: on that host its port must be free."""
    host, _, port = text.rpartition(":")
    try:
        found = resolve(host)
    except OSError as problem:
        remedy = "a name that all hosts know, or an address"
        return bad("endpoint", f"{host} has no address ({problem.strerror or problem})", remedy)
    if not any(_can(bind, address) for address in found):
        return note("endpoint", f"{text} is on another host: {', '.join(found)}", addresses=found)
    for address in filter(lambda each: _can(bind, each), found):
        try:
            bind(address, int(port))
        except OSError as problem:
            remedy = "another port, or end who listens there: ss -ltnp"
            return bad("endpoint", f"port {port} of {address}: {problem.strerror}", remedy, addresses=found)
    return good("endpoint", f"{text} is here, and its port is free", addresses=found)


def port_range(root: Path = Path("/")) -> Finding:
    """Judge how many connections this host can open: gloo takes some for every pair of ranks."""
    try:
        text = (root / "proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8")
        low, high = map(int, text.split())
    except (OSError, ValueError):
        return note("ports", "this system does not tell")
    count, values = high - low + 1, {"first": low, "last": high}
    if count < 4096:
        remedy = "sysctl net.ipv4.ip_local_port_range='32768 60999'"
        return warning("ports", f"{low} to {high}: {count} connections at most", remedy, **values)
    return good("ports", f"{low} to {high}", **values)


def interfaces() -> list[str]:
    """Return the names of this host's interfaces."""
    return [name for _, name in socket.if_nameindex()]


def unknown_interfaces(wanted: str, known: Iterable[str]) -> list[str]:
    """Return what of ``NCCL_SOCKET_IFNAME`` fits no interface: prefixes, ``=exact``, ``^not``."""
    if wanted.startswith("^"):
        return []
    exact, names = wanted.startswith("="), wanted.lstrip("=").split(",")
    fits = {name: any(k == name if exact else k.startswith(name) for k in known) for name in names}
    return [name for name, there in fits.items() if not there]


def _can(bind: Bind, address: str) -> bool:
    try:
        bind(address, 0)
    except OSError:
        return False
    return True
