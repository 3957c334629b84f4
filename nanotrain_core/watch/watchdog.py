"""A thread of every rank that reports the rank's progress, and detects when there is none.

Under our own launcher it only writes a *heartbeat* into the launcher's folder, and the launcher decides
(:mod:`nanotrain_core.watch.hang`): only the launcher sees all ranks of the host, including one whose every
thread is stopped. A rank that was started by torchrun or srun decides for itself: it writes the stacks of its
threads to the run folder and to stderr and ends, so that its launcher can restart it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from nanotrain_core.errors import Exit
from nanotrain_core.run import log
from nanotrain_core.run.files import write_text_atomically
from nanotrain_core.watch.beats import BeatFile
from nanotrain_core.watch.collectives import keep_collectives
from nanotrain_core.watch.hang import PATIENCE
from nanotrain_core.watch.progress import Progress
from nanotrain_core.watch.scratch import RankFile

#: Makes a rank write the stack of every thread, whatever it is doing: the handler is C code.
DUMP = signal.SIGUSR2
#: Fraction of the time that a rank may wait after which it saves its last collectives.
KEPT = 0.9
#: Folder in the run folder for the last heartbeat of each rank, to diagnose a rank whose host is gone, and
#: the seconds between two writes, since the run folder may be on a file system that all hosts share.
HEARTBEATS, SELDOM = "heartbeats", 10.0


class Watchdog(threading.Thread):
    """Watches the :class:`Progress` of its own process until that ends."""

    def __init__(
        self, progress: Progress, rank: int, *, timeout: float, folder: Path, scratch: Path | None
    ) -> None:
        """Watch.

        Args:
            progress: recorded by the engine.
            rank: this process's.
            timeout: seconds without progress that are too many.
            folder: the run folder.
            scratch: the launcher's folder, None without our launcher.

        Raises:
            LaunchError: the launcher's folder cannot be written.
        """
        super().__init__(name="watchdog", daemon=True)
        self.progress, self.rank, self.timeout = progress, rank, timeout
        self.folder, self.scratch = folder, scratch
        self.beats = BeatFile(scratch, rank) if scratch is not None else None
        self.interval = min(1.0, timeout / 10)
        self.keeping = threading.Thread()
        self.done = threading.Event()
        self.start()

    def run(self) -> None:
        """Send heartbeats until :meth:`stop`."""
        if self.scratch is not None:
            path = RankFile.STACKS.of(self.scratch, self.rank)
            self.stacks = open(path, "w", encoding="utf-8")  # noqa: SIM115
            faulthandler.register(DUMP, file=self.stacks, all_threads=True)
        seen, waited, last, kept, told = -1, 0.0, time.monotonic(), -1, 0.0
        while True:
            now, count, slow = time.monotonic(), self.progress.count, self.progress.slow
            # A process that was stopped and continued has not waited all that time.
            waited = 0.0 if count != seen else waited + min(now - last, 2 * self.interval)
            seen, last = count, now
            limit = self.timeout * (PATIENCE if slow else 1)
            if waited > KEPT * limit and kept != count:
                kept = count
                with contextlib.suppress(Exception):  # for debugging; the rank ends without it, too
                    keep_collectives(self.folder, self.rank)
            if now > told and self.progress.phase != "start":  # a refused run leaves nothing
                told = now + SELDOM
                if not self.keeping.is_alive():  # a file system that stalls must not stall this thread
                    self.keeping = threading.Thread(target=self._keep, name="heartbeat", daemon=True)
                    self.keeping.start()
            if self.beats is not None:
                self.beats.write({**self._at(), "count": count, "slow": slow})
            elif waited > limit:
                self._give_up()
            if self.done.wait(self.interval):
                return

    def stop(self) -> None:
        """Called when the rank is done, which may be before others are."""
        self.done.set()
        self.join()
        if self.beats is not None:
            self.beats.delete()

    def _at(self) -> dict[str, object]:
        at = self.progress
        return {"rank": self.rank, "pid": os.getpid(), "step": at.step, "phase": at.phase}

    def _keep(self) -> None:
        path = self.folder / HEARTBEATS / f"rank-{self.rank}.json"
        text = json.dumps({**self._at(), "host": socket.gethostname(), "time": time.time()})
        # A full disk, or the run folder is gone: it is for diagnosis alone.
        with contextlib.suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            write_text_atomically(path, text, flushed=False)

    def _give_up(self) -> None:
        """Write the stacks and end the process: no other process would."""
        at = f"step {self.progress.step}, {self.progress.phase}"
        with contextlib.suppress(OSError):
            folder = self.folder / "stacks"
            folder.mkdir(exist_ok=True)
            with open(folder / f"rank-{self.rank}.txt", "w", encoding="utf-8") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        text = f"rank {self.rank} made no progress for {self.timeout:g} seconds ({at}); its stacks:"
        log.say(text)
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        os._exit(Exit.HUNG)
