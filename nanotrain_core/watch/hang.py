"""The launcher's hang detection: which rank makes no progress, which blocks the others, which to kill.

Every rank writes a heartbeat (:mod:`nanotrain_core.watch.watchdog`) with a count of what it has begun. A
count that stays the same for too long means that the run hangs, and then all ranks hang: most wait in a
collective for one that does not arrive. That one is found by its heartbeat and its stack.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import attrs

from nanotrain_core.run import log
from nanotrain_core.run.files import read_each
from nanotrain_core.run.folder_owner import is_alive
from nanotrain_core.watch.beats import read_beats
from nanotrain_core.watch.collectives import DUMPS
from nanotrain_core.watch.scratch import RankFile

#: Factor by which the start, the first step and a checkpoint may take longer than other steps.
PATIENCE = 5
#: Seconds for ranks to end by themselves after another is gone.
LEFT_BEHIND = 3.0
#: Seconds between two checks.
INTERVAL = 0.5
#: Path pattern of code in which ranks wait for each other: a custom transport waits in a ``barrier.py``.
WAITING = (os.path.join("torch", "distributed"), f"{os.sep}barrier.py")


@attrs.define(frozen=True)
class Beat:
    """The last heartbeat of a rank."""

    rank: int
    pid: int
    count: int
    step: int
    phase: str
    slow: bool
    tick: int


@attrs.define(frozen=True)
class Stuck:
    """One rank of a hanging run."""

    beat: Beat
    silent: bool
    """Even its watchdog is silent: it is stopped, or stuck in code that never returns to Python."""
    stack: str
    """Stacks of all threads, as far as they could be obtained."""

    @property
    def where(self) -> str:
        """The innermost Python frame of the main thread, which is written last."""
        frames = re.findall(r'File "(.*)", line (\d+) in (\S+)', re.split("[Tt]hread 0x", self.stack)[-1])
        return "{}:{} in {}".format(*frames[0]) if frames else "an unknown place"

    @property
    def waits(self) -> bool:
        """Whether the rank waits for other ranks."""
        path, _, rest = self.where.partition(":")
        line = linecache.getline(path, int(rest.partition(" ")[0])) if rest else ""
        return any(part in path for part in WAITING) or ".wait(" in line or "dist." in line

    def describe(self) -> str:
        """Return one line on its location."""
        how = "is silent, stopped or stuck outside Python; it was last seen" if self.silent else "is"
        place = "" if self.silent else f", at {self.where}{' (waits for others)' if self.waits else ''}"
        return f"rank {self.beat.rank} {how} in step {self.beat.step}, {self.beat.phase}{place}"


def culprits(stuck: Sequence[Stuck]) -> list[Stuck]:
    """Return the ranks that block others: silent ones, else those furthest behind that wait for no rank."""
    for wanted in (
        [one for one in stuck if one.silent],
        [one for one in stuck if one.beat.count == min(s.beat.count for s in stuck) and not one.waits],
        [one for one in stuck if not one.waits],
        [one for one in stuck if one.beat.count == min(s.beat.count for s in stuck)],
    ):
        if wanted and len(wanted) < len(stuck):
            return wanted
    return list(stuck)


@attrs.define(frozen=True)
class Hang:
    """The report on ranks that hung."""

    text: str
    waits: bool
    """Whether all ranks of this host wait: perhaps for one of another host, which then is the cause."""


class HangWatch:
    """Checks the ranks of one host periodically, and kills those that nothing else would end."""

    def __init__(self, scratch: Path, folder: Path | None, timeout: float) -> None:
        """Watch.

        Args:
            scratch: where ranks write their pids and heartbeats.
            folder: the run folder, if the launcher knows it yet; it may be set later.
            timeout: seconds without progress that are too many; 0 disables the check.
        """
        self.scratch, self.folder, self.timeout = scratch, folder, timeout
        self.hang: Hang | None = None
        """The report on the ranks that hung in this attempt."""
        self._looked = time.monotonic()
        self._lock = threading.Lock()
        self.forget()

    def forget(self) -> None:
        """Forget ranks of an earlier attempt, which are all gone. Called by the agent's thread."""
        with self._lock:
            self.hang = None
            self._waited: dict[int, tuple[int, float]] = {}
            self._ticks: dict[int, tuple[int, float]] = {}
            self._alone = 0.0
            for kind in (RankFile.BEAT, RankFile.PID, RankFile.FAILURE):
                for path in self.scratch.glob(kind.pattern):
                    path.unlink(missing_ok=True)

    def look(self) -> None:
        """Detect ranks without progress, and ranks that outlive one that is gone."""
        now = time.monotonic()
        if now - self._looked >= INTERVAL and self.hang is None:
            with self._lock:
                self._look(now)

    def _look(self, now: float) -> None:
        passed, self._looked = min(now - self._looked, 2 * INTERVAL), now
        self._kill_survivors(passed)
        beats = self._beats() if self.timeout else []
        for beat in beats:
            self._waited[beat.rank] = _same_for(self._waited, beat.rank, beat.count, passed)
            self._ticks[beat.rank] = _same_for(self._ticks, beat.rank, beat.tick, passed)
        if any(self._waited[b.rank][1] > self.timeout * (PATIENCE if b.slow else 1) for b in beats):
            self._end_all(beats)

    def _beats(self) -> list[Beat]:
        return [Beat(**beat) for beat in read_beats(self.scratch)]

    def _kill_survivors(self, passed: float) -> None:
        """Kill ranks that keep running long after another one died: they may wait for it forever."""
        pids = pids_of(self.scratch)
        alive = [pid for pid in pids if pid and is_alive(pid)]
        self._alone = self._alone + passed if 0 < len(alive) < len(pids) else 0.0
        if self._alone > LEFT_BEHIND:
            kill(alive, signal.SIGKILL)

    def _end_all(self, beats: Sequence[Beat]) -> None:
        """Make every rank write its stacks, report which rank blocks the others, and kill them all."""
        kill([beat.pid for beat in beats], signal.SIGUSR2)
        time.sleep(1.0)
        slow_tick = min(self.timeout / 2, 10.0)
        stuck = [Stuck(b, self._ticks[b.rank][1] > slow_tick, self._stack(b.rank)) for b in beats]
        guilty = culprits(sorted(stuck, key=lambda one: one.beat.rank))
        names = ", ".join(str(one.beat.rank) for one in guilty)
        known = len(guilty) < len(stuck) or not all(one.waits for one in stuck)
        text = f"rank {names} hung" if known else "no rank goes on, all wait for others"
        text += f": no progress for {self.timeout:g} seconds"
        self.hang = Hang(text, all(one.waits and not one.silent for one in guilty))
        log.say(text)
        for one in sorted(stuck, key=lambda one: (one not in guilty, one.beat.rank)):
            log.say(f"  {one.describe()}")
        print("".join(one.stack for one in guilty if not one.silent), file=sys.stderr, end="")
        self._keep_stacks()
        kill([beat.pid for beat in beats], signal.SIGKILL)

    def _stack(self, rank: int) -> str:
        path = RankFile.STACKS.of(self.scratch, rank)
        return path.read_text(errors="replace") if path.exists() else ""

    def _keep_stacks(self) -> None:
        if self.folder is None:
            return
        kept = self.folder / "stacks" / time.strftime("%Y%m%d-%H%M%S")
        with contextlib.suppress(OSError):
            kept.mkdir(parents=True, exist_ok=True)
            for path in self.scratch.glob(RankFile.STACKS.pattern):
                shutil.copy(path, kept / path.name.replace("stacks", "rank"))
            log.say(f"the stacks of all ranks are in {kept}", level="warning")
            if any(self.folder.glob(f"{DUMPS}/rank-*")):
                dumps = f"`torchfrtrace {self.folder / DUMPS} --prefix rank-` compares them"
                log.say(f"NCCL's last collectives are kept: {dumps}", level="warning")


def _same_for(seen: dict[int, tuple[int, float]], rank: int, value: int, passed: float) -> tuple[int, float]:
    """Return the value and for how many seconds it has been the same."""
    before, seconds = seen.get(rank, (-1, 0.0))
    return (value, seconds + passed) if value == before else (value, 0.0)


def pids_of(scratch: Path) -> list[int]:
    """Return the processes of ranks that have begun and not ended; 0 for one about to write its pid."""
    return [int(text or 0) for _, text in read_each(scratch, RankFile.PID.pattern)]


def kill(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to processes, except those that are gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
