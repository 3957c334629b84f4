"""Several hosts on one machine: each has its own processes, name, address and /dev/shm.

A :class:`Host` is a set of Linux namespaces, so to kill the first process of one kills them all. The hosts
reach each other through a :class:`Network` in this process, which forwards the packets of one TUN device
for each host. It can delay them, lose some, and part hosts from one another; a kernel without ``netem`` is
enough.

It needs Linux, root (or a user namespace in which one is root), ``unshare``, ``nsenter`` and ``ip``.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import select
import shutil
import signal
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from types import TracebackType

#: Of ``linux/if_tun.h``: name a device of the file; packets of IP, without a header of their own.
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
#: Bytes of the largest packet. Copying few large ones costs this process least.
MTU = 65000
#: Packets taken from a host before the next one has its turn.
_AT_ONCE = 32
PROGRAMS = ("unshare", "nsenter", "ip", "hostname", "mount", "sleep")


def not_here() -> str:
    """Return why this machine cannot run virtual hosts: empty if it can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "/dev/net/tun cannot be opened"
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "true"], check=False)
    return "" if tried.returncode == 0 else "namespaces are not allowed: run it as root"


class Host:
    """One host, created by :class:`Network`."""

    def __init__(self, name: str, address: str, names: Path) -> None:
        """Start, with the file of host names at ``names``."""
        self.name, self.address = name, address
        script = (
            f"hostname {name} && mount --bind {names} /etc/hosts && mount -t tmpfs tmpfs /dev/shm && "
            "ip link set lo up && echo ready && exec sleep infinity"
        )
        spaces = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._outside = subprocess.Popen(
            [*spaces, "sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._outside.stdout is not None
        if self._outside.stdout.readline() != "ready\n":
            raise RuntimeError(f"the namespaces of {name} could not be made")
        children = Path(f"/proc/{self._outside.pid}/task/{self._outside.pid}/children")
        self._first = int(children.read_text().split()[0])
        self.device = self._connect()

    def _connect(self) -> int:
        """Return the file of packets to and from this host."""
        device, name = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK), f"nt{self._first}"
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
        subprocess.run(["ip", "link", "set", name, "netns", str(self._first)], check=True)
        named, addressed = f"link set {name} name eth0 mtu {MTU}", f"addr add {self.address}/24 dev eth0"
        for words in (named, addressed, "link set eth0 up"):
            subprocess.run([*self._into("net"), "--", "ip", *words.split()], check=True)
        return device

    def words(self, folder: Path) -> list[str]:
        """Return the command prefix that runs a command on this host, in ``folder``."""
        return [*self._into("net", "uts", "mount", "pid"), f"--wdns={folder}", "--"]

    def _into(self, *spaces: str) -> list[str]:
        return ["nsenter", f"--target={self._first}", *(f"--{space}" for space in spaces)]

    def kill(self) -> None:
        """Kill all its processes at once."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._first, signal.SIGKILL)
        self._outside.wait()


class Network:
    """Hosts that reach each other at their own addresses, and the packets between them."""

    def __init__(self, count: int, *, delay: float = 0.0, loss: float = 0.0, seed: int = 0) -> None:
        """Create the hosts ``host0``, ``host1``, ... at 10.77.0.1, 10.77.0.2, ...

        Args:
            count: how many.
            delay: seconds that each packet takes, one way.
            loss: the part of packets that never arrive, between 0 and 1.
            seed: of which those are.
        """
        self.delay, self.loss = delay, loss
        self._random = Random(seed)
        self._folder = tempfile.TemporaryDirectory(prefix="nanotrain-")
        self._names = Path(self._folder.name, "hosts")
        rows = [f"10.77.0.{number + 1} host{number}\n" for number in range(count)]
        self._names.write_text("127.0.0.1 localhost\n" + "".join(rows))
        self._parted: set[tuple[int, int]] = set()
        self._gone: set[int] = set()
        self._changed = threading.Lock()
        self.hosts = [self._host(number) for number in range(count)]
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._number = 0
        self._ends = False
        self._thread = threading.Thread(target=self._forward, daemon=True)
        self._thread.start()

    def _host(self, number: int) -> Host:
        return Host(f"host{number}", f"10.77.0.{number + 1}", self._names)

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends = True
        self._thread.join()
        for host in self.hosts:
            host.kill()
            os.close(host.device)
        self._folder.cleanup()

    def vanish(self, number: int) -> None:
        """Power off a host: all its processes stop, and no packet closes its connections."""
        with self._changed:
            self._gone.add(number)
        self.hosts[number].kill()

    def replace(self, number: int) -> Host:
        """Return a new host with the name and address of one that was powered off."""
        with self._changed:
            os.close(self.hosts[number].device)
            self.hosts[number] = self._host(number)
            self._gone.discard(number)
        return self.hosts[number]

    def part(self, some: Sequence[int], others: Sequence[int]) -> None:
        """Drop all packets between ``some`` hosts and ``others``."""
        self._parted |= {pair for one in some for other in others for pair in ((one, other), (other, one))}

    def heal(self) -> None:
        """Deliver every packet again."""
        self._parted.clear()

    # --- packets ------------------------------------------------------------------------------

    def _forward(self) -> None:
        while not self._ends:
            due = self._waiting[0][0] - time.monotonic() if self._waiting else 0.05
            with self._changed:
                of = {host.device: number for number, host in enumerate(self.hosts)}
                ready, _, _ = select.select(list(of), [], [], min(0.05, max(0.0, due)))
                for device in ready:
                    self._take(device, of[device])
                self._deliver()

    def _take(self, device: int, source: int) -> None:
        """Receive packets from a host, except those that are dropped."""
        for _ in range(_AT_ONCE):
            try:
                packet = os.read(device, MTU)
            except OSError:  # no more of them, or the host is gone
                return
            if packet[0] >> 4 != 4 or packet[16:19] != bytes((10, 77, 0)):
                continue
            target = packet[19] - 1
            lost = self.loss > 0 and self._random.random() < self.loss
            if not lost and 0 <= target < len(self.hosts) and self._reach(source, target):
                self._number += 1
                heapq.heappush(self._waiting, (time.monotonic() + self.delay, self._number, target, packet))

    def _reach(self, source: int, target: int) -> bool:
        return (source, target) not in self._parted and not self._gone & {source, target}

    def _deliver(self) -> None:
        """Deliver the packets that are due."""
        while self._waiting and self._waiting[0][0] <= time.monotonic():
            _, _, target, packet = heapq.heappop(self._waiting)
            with contextlib.suppress(OSError):  # its queue is full, or it is gone
                os.write(self.hosts[target].device, packet)
