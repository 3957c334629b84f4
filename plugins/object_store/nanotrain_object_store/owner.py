"""Ownership of a prefix: by one run at a time, which any other run names in its error. Torch-free.

The object ``OWNER.json`` names the run, its host and its process, and is rewritten as a heartbeat. A run that
sees the heartbeat of another one within a lease does not start. Hosts' clocks differ and are not compared:
the run waits for the duration of the lease instead.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import attrs

from nanotrain_core.api import Exit, NanotrainError, load_json
from nanotrain_object_store.store import Store

OWNER = "OWNER.json"
_LARGEST = 65536


class Taken(NanotrainError):
    """Another run has the prefix."""

    exit_code = Exit.LOCKED


class OthersPrefix(NanotrainError):
    """The prefix is another run's, or has checkpoints of this run although it begins anew."""


def holds_checkpoints(store: Store, steps: Iterable[int]) -> OthersPrefix:
    """Return the refusal of a run that begins anew where checkpoints are."""
    there = ", ".join(map(str, sorted(steps)))
    return OthersPrefix(
        f"{store.url} holds checkpoints of this run (steps {there}), and it begins anew: add --resume to go "
        "on from them, or name another prefix"
    )


def process_start(pid: int) -> str:
    """Return when a process of this host began, in clock ticks, after the host's boot and its namespace.

    With all three, a reused process id, or one of another machine or container with the same host name, is
    not confused with the process: the first namespace has the same number on every machine. Empty if the
    process is gone. Where the system does not tell, a process that may live is a space.
    """
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return ""
    except PermissionError:
        pass
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        namespace = os.readlink("/proc/self/ns/pid")
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return " "
    return "" if fields[0] in "ZX" else f"{boot}/{namespace} {fields[19]}"


@attrs.define(frozen=True, kw_only=True)
class Owner:
    """A run that claims a prefix, and its process."""

    run: str
    """Name of the run."""
    id: str
    """Id of the run folder, which a copy of the folder has too."""
    host: str = attrs.field(factory=socket.gethostname)
    pid: int = attrs.field(factory=os.getpid)
    start: str = attrs.field(factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S"))
    began: str = attrs.field(factory=lambda: process_start(os.getpid()))
    """See :func:`process_start`."""
    beat: int = 0
    ended: bool = False

    def same(self, other: Owner) -> bool:
        """Return whether the other one is this attempt at the run, with a later or earlier heartbeat."""
        return attrs.evolve(self, beat=0, ended=False) == attrs.evolve(other, beat=0, ended=False)

    def text(self) -> bytes:
        """Return it as JSON."""
        return json.dumps(attrs.asdict(self)).encode()

    def __str__(self) -> str:
        """Return it in words."""
        return f"run '{self.run}', process {self.pid} on {self.host}, started {self.start}"

    def is_gone(self) -> bool:
        """Return whether it has certainly ended: it is marked so, or its process on this host is gone."""
        if self.ended:
            return True
        processes = process_start(os.getpid()).partition(" ")[0]
        here = self.host == socket.gethostname() and self.began.partition(" ")[0] == processes
        return here and process_start(self.pid) not in (self.began, " ")


def read_owner(store: Store) -> Owner | None:
    """Return the owner of the prefix; None if there is none.

    Raises:
        OthersPrefix: the object was not written by a run.
    """
    data = store.read(OWNER, most=_LARGEST)
    if data is None:
        return None
    try:
        found: Any = load_json(data)
        kinds: dict[str, type] = dict.fromkeys(("run", "id", "host", "start", "began"), str)
        kinds |= {"pid": int, "beat": int, "ended": bool}
        if not isinstance(found, dict) or any(
            type(found.get(key)) is not kind for key, kind in kinds.items()
        ):
            raise ValueError(f"expected the keys {', '.join(kinds)}")
        for key, kind in kinds.items():
            found[key] = _short(found[key]) if kind is str else found[key]
        return Owner(**{key: found[key] for key in kinds})
    except (ValueError, UnicodeDecodeError) as problem:
        raise OthersPrefix(
            f"{store.url}/{OWNER} does not say which run has the prefix ({problem}): delete it if none has"
        ) from None


def _short(text: str) -> str:
    """Return a stranger's text as it may be printed."""
    return "".join(c if c.isprintable() else "?" for c in text[:200])


def take(
    store: Store, own: Owner, *, lease: float, sleep: Callable[[float], object] = time.sleep
) -> Owner | None:
    """Acquire the prefix. Waits up to ``lease`` seconds if another process may still own it.

    That process may be one of the same run folder: a copy of the folder has the same id.

    Returns:
        The owner before.

    Raises:
        Taken: a live run has it.
        OthersPrefix: it is that of a run of another name.
    """
    found = read_owner(store)
    if found is not None and found.run != own.run:
        raise OthersPrefix(
            f"{store.url} is the prefix of {found}; expected one of run '{own.run}' alone: name another"
        )
    if found is not None and not found.same(own) and not found.is_gone():
        _wait_for(store, found, lease, sleep)
    if found is None and store.create(OWNER, own.text()):
        pass
    elif found is not None:
        store.put_bytes(OWNER, own.text())
    expect_ours(store, own, found)
    return found


def _wait_for(store: Store, found: Owner, lease: float, sleep: Callable[[float], object]) -> None:
    until = time.monotonic() + lease
    while time.monotonic() < until:
        sleep(min(1.0, lease / 4))
        now = read_owner(store)
        if now is None or now.ended:
            return
        if now != found:
            raise Taken(f"{store.url} is in use by another run: {now}")


def expect_ours(store: Store, own: Owner, before: Owner | None = None) -> None:
    """Look whether the prefix is this run's still.

    ``before``: the owner that this run has replaced, which a store may return for a while after that. If it
    were alive it would have another heartbeat.

    Raises:
        Taken: another one has taken it.
    """
    now = read_owner(store)
    if now is None or now.same(own):
        return
    if before is None or not now.same(before) or now.beat != before.beat:
        raise Taken(f"{store.url} is in use by another run: {now}")
