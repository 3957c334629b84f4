"""Detection of failed ranks among ranks without a common launcher; all report the same cause.

The launcher of `nanotrain run` detects how the ranks of its own host end. It cannot detect this for ranks of
other hosts, and ranks that srun or torchrun started have no such launcher. When one of these dies, gloo
closes the connections to it with an error that names only an address, and NCCL waits for its timeout; when
its host loses power, connections are not even closed. So a thread of each rank writes a *heartbeat* into the
ranks' common store. Rank 0's thread reads the heartbeats, and announces the first rank that has failed or has
been silent for too long; the other ranks read the announcement. They detect the end of rank 0 by its store,
which ends with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from nanotrain_core.errors import Exit, NanotrainError
from nanotrain_core.launch.cause import AttemptEnded, PeerLostError, error_text, exit_code_of, is_echo
from nanotrain_core.run import log

if TYPE_CHECKING:
    from torch.distributed import Store

#: Seconds without a heartbeat after which a rank is considered dead: stopped, or its host is.
SILENCE = 60.0
#: Heartbeats that a rank may miss after a connection to some rank was closed.
MISSED = 5
#: Seconds for a rank to end by its own error before its thread ends it, and for rank 0 to keep its store.
LINGER = 5.0
#: Seconds for it to tell its monitors of the failure, which send alerts.
TELLING = 30.0
#: Exits that are not failures.
ASKED_FOR = (Exit.PREEMPTED, Exit.INTERRUPTED)


@contextlib.contextmanager
def watching_peers(
    store: Store,
    rank: int,
    world_size: int,
    at_end: Callable[[NanotrainError], object] | None = None,
    interrupt: Callable[[], None] | None = None,
    tells: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Watch the other ranks while the block runs. Every rank of the world enters it.

    Args:
        store: their common store.
        rank: this one.
        world_size: number of ranks.
        at_end: called before this rank is ended because another one is gone; None prints the cause.
        interrupt: called before that, to end the block instead of the process.
        tells: returns whether this rank tells its monitors of the failure, after which the block ends.

    Raises:
        PeerLostError: instead of an error that only reports a closed connection: which rank ended, on which
            host, and why, if it reported it.
    """
    peers = Peers(store, rank, world_size, at_end=at_end, interrupt=interrupt, tells=tells)
    try:
        yield
    except BaseException as problem:
        first = None
        peers.ending.set()
        if getattr(problem, "exit_code", None) not in ASKED_FOR and not isinstance(
            problem, KeyboardInterrupt
        ):
            first = peers.failed(problem)
        if first is not None:
            raise first from problem
        raise
    finally:
        peers.stop()


class Peers(threading.Thread):
    """One rank's heartbeat, and its reader of announcements. Runs until :meth:`stop`."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        silence: float = SILENCE,
        interval: float | None = None,
        linger: float = LINGER,
        at_end: Callable[[NanotrainError], object] | None = None,
        interrupt: Callable[[], None] | None = None,
        tells: Callable[[], bool] = lambda: False,
    ) -> None:
        """Begin to send heartbeats.

        Args:
            store: of the ranks of this attempt; it is cloned, as other threads wait in it.
            rank: this process's.
            world_size: ranks that send heartbeats.
            silence: seconds without a heartbeat after which a rank is considered dead; at least
                2 * :data:`MISSED` intervals.
            interval: seconds between heartbeats. None: 1, or more so that the store receives at most 100
                heartbeats per second.
            linger: see :data:`LINGER`; at least two heartbeats.
            at_end: see :func:`watching_peers`.
            interrupt: likewise.
            tells: likewise.
        """
        super().__init__(name="peers", daemon=True)
        from torch.distributed import PrefixStore

        self.rank, self.world_size, self.at_end = rank, world_size, at_end or say
        self.interrupt, self.tells = interrupt, tells
        self.interval = max(1.0, world_size / 100) if interval is None else interval
        self.silence = max(silence, 2 * MISSED * self.interval)
        self.linger = max(linger, 2 * self.interval)
        self.store = PrefixStore("peers", store).clone()  # type: ignore[attr-defined]  # no stub has it
        self.store.set_timeout(timedelta(seconds=self.silence))
        self.store.set(f"at/{rank}", json.dumps([socket.gethostname(), os.getpid()]))
        self.done, self.ending = threading.Event(), threading.Event()
        self._heard: dict[int, tuple[bytes, float]] = {}
        """On rank 0: the last heartbeat of each other rank, and for how many seconds it has been the last."""
        self._host_0 = ""
        self._rank_0_ended = False
        self.start()

    def run(self) -> None:
        """Send heartbeats, read announcements, and on rank 0 watch the others."""
        count, last, unreachable = 0, time.monotonic(), 0
        while not self.done.wait(self.interval):
            # All processes of a job may be suspended and resumed: that does not count as silence.
            now = time.monotonic()
            passed, last = min(now - last, 2 * self.interval), now
            count += 1
            try:
                self.store.set(f"beat/{self.rank}", str(count))
                self._listen(passed)
                if (first := self._first()) is not None:
                    return self._end(first)
                if self._rank_0_ended:  # no rank watches any more, and its store may end
                    return None
                unreachable = 0
            except RuntimeError:  # all errors of a store are of this class
                unreachable += 1
                if unreachable == MISSED:
                    return self._end(self._without_store())

    def failed(self, problem: BaseException) -> NanotrainError | None:
        """Return another rank's failure if ``problem`` is only an echo of it; otherwise announce this one,
        unless this rank's attempt was ended: the launcher knows why, or it was announced.

        An echo, such as a closed connection, is announced as well if no other failure is announced within
        seconds. Returns None if ``problem`` itself is the cause.
        """
        self.ending.set()
        echo = is_echo(problem)
        try:
            if isinstance(problem, AttemptEnded):
                self.linger = 0.0  # the launcher waits
                self.store.set("closed", "")
                return self._first()
            if echo:
                self.store.set("closed", "")
                until = time.monotonic() + MISSED * self.interval + self.linger
                while time.monotonic() < until:
                    if (first := self._first()) is not None:
                        return first
                    time.sleep(0.1)
            text = f"rank {self.rank} on {socket.gethostname()} failed: {error_text(problem)}"
            self._announce(text, exit_code_of(problem))
        except RuntimeError:
            return self._without_store() if echo and not self._rank_0_ended else None
        return None

    def stop(self) -> None:
        """End the thread. Rank 0 first waits until the others have read that it ends.

        It waits at most a few seconds after a failure, otherwise at most half of the time after which a
        silent rank is considered dead.
        """
        with contextlib.suppress(RuntimeError):
            self.store.set(f"ended/{self.rank}", "")
            patience = self.linger if self.ending.is_set() else max(self.linger, self.silence / 2)
            until = time.monotonic() + patience
            while self.rank == 0 and time.monotonic() < until:
                if all(self._knows(other) for other in range(1, self.world_size)):
                    break
                time.sleep(0.05)
        self.done.set()
        self.join(LINGER)

    def _listen(self, passed: float) -> None:
        if self.rank == 0:
            return self._look(passed)
        if not self._host_0 and self.store.check(["at/0"]):
            self._host_0, _ = json.loads(self.store.get("at/0"))
        if self.store.check(["ended/0"]):
            self._rank_0_ended = True
            self.store.set(f"heard/{self.rank}", "")

    def _look(self, passed: float) -> None:
        """Announce a silent rank. Only on rank 0."""
        limit = MISSED * self.interval if self.store.check(["closed"]) else self.silence
        for other in range(1, self.world_size):
            key = f"beat/{other}"
            beat = self.store.get(key) if self.store.check([key]) else b""
            before, waited = self._heard.get(other, (b"", 0.0))
            waited = waited + passed if beat == before else 0.0
            self._heard[other] = (beat, waited)
            if waited > limit and not self._knows(other):
                there = self.store.check([f"at/{other}"])
                host, pid = json.loads(self.store.get(f"at/{other}")) if there else ("an unknown host", "?")
                text = (
                    f"rank {other} on {host} (process {pid}) is gone: no sign of it for {waited:.0f} seconds"
                )
                self._announce(text, Exit.FAILED)

    def _announce(self, text: str, code: int) -> None:
        """Announce the failure, unless one was announced."""
        self.store.compare_set("first", "", json.dumps([text, code]))

    def _first(self) -> NanotrainError | None:
        """Return the announcement."""
        if not self.store.check(["first"]):
            return None
        text, code = json.loads(self.store.get("first"))
        self.store.set(f"heard/{self.rank}", "")
        return PeerLostError(text).with_code(code)

    def _knows(self, other: int) -> bool:
        return any(self.store.check([f"{end}/{other}"]) for end in ("ended", "heard"))

    def _without_store(self) -> NanotrainError:
        where = f"where the ranks met{f', on {self._host_0}' if self._host_0 else ''}"
        text = f"rank 0, or its host, is gone: the store {where} does not answer"
        return PeerLostError(text).with_code(Exit.FAILED)

    def _end(self, first: NanotrainError) -> None:
        """End this rank, which may hang in a collective, unless it ends by itself."""
        if self._ends():
            return
        if self.interrupt is not None:
            self.interrupt()
            if self._ends():
                return
        self.at_end(first)
        os._exit(first.exit_code)

    def _ends(self) -> bool:
        """Return whether this rank ends within :attr:`linger`, or while it tells its monitors."""
        began = time.monotonic()
        while not self.ending.is_set() and not self.done.wait(0.1):
            if time.monotonic() - began > (TELLING if self.tells() else self.linger):
                return False
        return True


def say(cause: NanotrainError) -> None:
    """Print the end of a rank that was not started by our launcher."""
    log.say(str(cause))
