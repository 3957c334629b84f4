"""Decides whether and when failed ranks are restarted."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from nanotrain_core.launch.cause import Cause, first_cause
from nanotrain_core.launch.hosts import MEETING
from nanotrain_core.run import log
from nanotrain_core.run.files import write_text_atomically
from nanotrain_core.watch.hang import Hang
from nanotrain_core.watch.scratch import FAILED_AT, HAS_SAVED, RECOVERABLE

#: Consecutive restarts without a checkpoint in between after which no further one is made.
MOST_IN_VAIN = 5
#: Seconds before the second consecutive restart without a checkpoint; doubled before each further one.
PAUSE, LONGEST_PAUSE = 1.0, 60.0
#: How often a host's ranks may be the first to fail before it leaves a run that can continue without it.
HOST_FAILURES = 2


class Restarts:
    """Reports the cause of each failure, and decides on the restart.

    Progress is a new checkpoint, or a later step than ever before whose state a monitor has kept.
    """

    def __init__(
        self,
        scratch: Path,
        most: int,
        stopped: Callable[[], bool],
        elsewhere: Callable[[Cause], Cause],
        *,
        may_leave: bool = False,
    ) -> None:
        """Create the restarts of one launcher.

        Args:
            scratch: the folder in which its ranks record their errors, and that they have saved.
            most: maximum number of restarts.
            stopped: returns whether a signal was received.
            elsewhere: returns the first cause of all hosts, given that of this one.
            may_leave: whether the other hosts can continue without this one.
        """
        self.scratch, self.most, self.stopped, self.elsewhere = scratch, most, stopped, elsewhere
        self.number = 0
        """Number of restarts so far, except those caused by ranks on other hosts."""
        self.left: Cause | None = None
        """Why this host has left the run to the others, if it has."""
        self._saved, self._step, self._in_vain = 0.0, 0, 0
        self._may_leave, self._first_here = may_leave, 0

    def again(self, codes: Mapping[int, int], number: int, hang: Hang | None) -> bool:
        """Print why the ranks ended; return whether to restart them, for the ``number``-th time.

        If nothing was saved since the last restart, only after a pause, or not at all.

        Args:
            codes: exit status of each rank's process.
            number: of the restart that would follow.
            hang: the report on ranks that hung.
        """
        seen_at = time.time()
        own = first_cause(self.scratch, codes, hang)
        cause = self.elsewhere(own)
        if cause.mistake or self.stopped():
            return False
        self._first_here += cause is own and not own.echo
        if self._may_leave and self._first_here >= HOST_FAILURES:
            self.left = cause
            return False
        self._record(seen_at)
        mark, kept = self.scratch / HAS_SAVED, self.scratch / RECOVERABLE
        saved = mark.stat().st_mtime if mark.exists() else 0.0
        step = int(kept.read_text()) if kept.exists() else 0
        progress = saved != self._saved or step > self._step
        self._in_vain = 1 if progress else self._in_vain + 1
        self._saved, self._step = saved, max(step, self._step)
        if self._in_vain > MOST_IN_VAIN:
            log.say(f"giving up after {MOST_IN_VAIN} consecutive restarts without a new checkpoint")
            return False
        pause = self._pause()
        where = "the newest checkpoint" if saved else "where it began"
        where = f"what is kept of step {step}, or {where}" if step else where
        later = f" in {pause:g} s" if pause else ""
        cause.tell(f"; restarting{later} ({number} of {self.most}) from {where}")
        until = time.monotonic() + pause
        while time.monotonic() < until and not self.stopped():
            time.sleep(0.1)
        self.number = number
        return not self.stopped()

    def meet_again(self, endpoint: str) -> bool:
        """Return whether to wait for the lost host that serves ``endpoint``, and then to restart.

        That counts as a restart.
        """
        if self.number >= self.most or self.stopped():
            return False
        self.number += 1
        self._record(time.time())
        log.say(
            f"{endpoint}, where the hosts meet, is gone: waiting for it, or for a host in its place, "
            f"for {MEETING} s at most, to start again ({self.number} of {self.most})"
        )
        return True

    def _record(self, seen_at: float) -> None:
        """Record when a failure was detected, for the report of the restarted ranks."""
        path = self.scratch / FAILED_AT
        # On a full disk only the report lacks it; an error here would end the run, on all hosts.
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            write_text_atomically(path, str(seen_at))

    def _pause(self) -> float:
        """Return the seconds to wait: none at first, since most failures are over when they are detected."""
        return min(LONGEST_PAUSE, PAUSE * 2.0 ** (self._in_vain - 2)) if self._in_vain > 1 else 0.0
