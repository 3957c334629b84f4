"""The processes of this host's ranks, as their launcher sees them: started, watched, kept or stopped."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import attrs

from nanotrain_core.launch.rank_process import DONE, LEAVE, LEFT, serve
from nanotrain_core.launch.worker import Job
from nanotrain_core.run import log
from nanotrain_core.watch.scratch import RankFile

#: Seconds for ranks to end after SIGTERM, or to tell their monitors of a failure.
GRACE = 30.0
#: Seconds in which ranks must have ended an attempt to be kept. One that never returns to its main function
#: is killed earlier, as one that outlives another rank.
LEAVING = 15.0
#: Seconds for the process that has failed to be seen, after one that has only noticed it.
FIRST = 1.0
POLL = 0.02


@attrs.define(eq=False)
class StartedRank:
    """A rank's process, as its launcher sees it."""

    process: ForkServerProcess
    connection: Connection
    number: str = ""
    """The rank's number in the run."""
    ends: str | None = None
    """How the run ended on this rank, once its job has returned."""
    left: int | None = None
    """The exit code that it would have, once it has ended an attempt because another rank failed."""
    left_at: float = 0.0

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    @property
    def trains(self) -> bool:
        """Whether the rank is in an attempt."""
        return self.alive and self.left is None and self.ends is None

    def read(self) -> None:
        """Receive what the rank has sent."""
        with suppress(EOFError, OSError):
            while self.connection.poll():
                kind, value = self.connection.recv()
                if kind == DONE:
                    self.ends = value
                elif kind == LEFT:
                    self.left, self.left_at = value, time.monotonic()

    def send(self, message: Any) -> None:
        """Send a message to the rank, unless its process is gone."""
        with suppress(OSError):
            self.connection.send(message)


class RankProcesses:
    """The rank processes of this host."""

    def __init__(self, job: Job, patience: float) -> None:
        """Start no process yet.

        Args:
            job: to run.
            patience: seconds for processes to end after the run; 0: any time.
        """
        self.job, self.patience = job, patience
        self._ranks: dict[int, StartedRank] = {}
        """The processes, by local rank."""

    def begin(self, environments: Mapping[int, Mapping[str, str]]) -> dict[int, int]:
        """Begin an attempt on every rank, in new processes where none is kept.

        Args:
            environments: what each local rank adds to its environment.

        Returns:
            The process id of each local rank.
        """
        for local, environment in environments.items():
            if local not in self._ranks:
                self._ranks[local] = self._start(local)
            rank = self._ranks[local]
            rank.ends = rank.left = None
            rank.number = environment["RANK"]
            rank.send(dict(environment))
        return {local: rank.process.pid or 0 for local, rank in self._ranks.items()}

    def _start(self, local: int) -> StartedRank:
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("forkserver")
        process = context.Process(target=serve, args=(theirs, self.job), name=f"rank-{local}")
        process.start()
        theirs.close()
        return StartedRank(process, ours)

    def poll(self) -> tuple[dict[int, str], dict[int, int]]:
        """Return, by local rank, how the run ended where it has, and exit codes of ranks that have failed.

        A rank that has only noticed another one's failure counts a second later, since that one is the cause.
        """
        ends, codes, left = dict[int, str](), dict[int, int](), dict[int, int]()
        for local, rank in self._ranks.items():
            alive = rank.alive
            rank.read()
            if rank.ends is not None:
                ends[local] = rank.ends
            elif not alive:
                codes[local] = rank.process.exitcode or 0
            elif rank.left is not None:
                left[local] = rank.left
        if codes or any(time.monotonic() - self._ranks[local].left_at > FIRST for local in left):
            codes = {**left, **codes}
        return ends, codes

    def keep_survivors(self) -> Collection[int]:
        """Ask all ranks to end their attempt, as one has failed, and kill those that do not in time.

        Returns:
            The local ranks that have.
        """
        self._end_attempts(LEAVING)
        gone = {local: rank for local, rank in self._ranks.items() if rank.left is None or not rank.alive}
        for rank in gone.values():
            rank.process.kill()
        self._forget(gone)
        return self._ranks.keys()

    def end_after_failure(self, seconds: float = GRACE) -> None:
        """End all ranks after a failure, and kill those that take longer than so many seconds."""
        self._end_attempts(seconds)
        self.stop(seconds=0.0)

    def _end_attempts(self, seconds: float) -> None:
        """Ask all ranks to end their attempts and wait for that, at most so many seconds.

        A rank whose id its process has deleted tells its monitors of the failure: an alert may take longer.
        """
        for rank in self._ranks.values():
            rank.send(LEAVE)
        began, scratch = time.monotonic(), Path(self.job.scratch or "")
        while waiting := [rank for rank in self._ranks.values() if rank.trains]:
            passed = time.monotonic() - began
            most = {
                rank: seconds if RankFile.PID.of(scratch, rank.number).exists() else GRACE for rank in waiting
            }
            if all(passed > most[rank] for rank in waiting):
                break
            time.sleep(POLL)
            for rank in waiting:
                rank.read()

    def end(self) -> None:
        """Let ranks whose job has returned end, and wait for it: a thread may still write or upload.

        One that does not end in time is killed: nothing else would end it, and the run is complete.
        """
        for rank in self._ranks.values():
            rank.send(None)
        until = time.monotonic() + self.patience
        for rank in self._ranks.values():
            rank.process.join(max(0.0, until - time.monotonic()) if self.patience else None)
            if rank.alive:
                late = f"did not end within {self.patience:g} seconds after the run"
                log.say(
                    f"rank {rank.number} (process {rank.process.pid}) {late}: it is killed", level="warning"
                )
                rank.process.kill()
        self._forget(dict(self._ranks))

    def stop(self, number: signal.Signals = signal.SIGTERM, seconds: float = GRACE) -> None:
        """Signal all ranks to end, and kill those that have not after so many seconds."""
        alive = [rank.process for rank in self._ranks.values() if rank.alive]
        for rank in self._ranks.values():
            rank.send(None)  # one that takes the signal for a request to its run may end its attempt instead
        for process in alive:
            with suppress(ProcessLookupError):
                os.kill(process.pid or 0, number)
        until = time.monotonic() + seconds
        for process in alive:
            process.join(max(0.0, until - time.monotonic()))
            process.kill()
        self._forget(dict(self._ranks))

    def _forget(self, ranks: Mapping[int, StartedRank]) -> None:
        """Wait for the end of processes, for at most :data:`GRACE` seconds each, and kill what is left."""
        for local, rank in ranks.items():
            rank.process.join(GRACE)
            rank.process.kill()
            rank.connection.close()
            del self._ranks[local]
