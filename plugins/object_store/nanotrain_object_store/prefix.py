"""Rank 0's operations in the store: own the prefix, publish, delist abandoned checkpoints, delete old ones.

A separate thread sends heartbeats, and repeats what failed while the store was down. Torch-free.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import attrs

from nanotrain_core.api import NanotrainError
from nanotrain_object_store.abandoned_branch import LeftBranch
from nanotrain_object_store.catalogue import expendable, look, missing, remove, supersede
from nanotrain_object_store.owner import OWNER, Owner, expect_ours, holds_checkpoints, take
from nanotrain_object_store.store import Store, in_words
from nanotrain_object_store.stored import MARKER, Stored, step_of

#: Signs of life in a lease.
BEATS = 3


class Prefix:
    """The prefix of one run, on rank 0. Methods raise the exceptions of the store."""

    def __init__(
        self, store: Store, own: Owner, *, keep: int, lease: float, folder: Path | None = None
    ) -> None:
        """Prepare without a request to the store; ``folder``: the run folder."""
        self.store, self.own, self.keep, self.lease = store, own, keep, lease
        self.refused = ""
        """Why the prefix is not this run's: another one has it."""
        self.claimed = False
        self._before: Owner | None = None
        """The owner that this run has replaced."""
        self.begins_anew = False
        """Whether the run begins anew: then its prefix must not have any checkpoints."""
        self.left = LeftBranch(folder)
        self.sweep_problem = ""
        """What went wrong when old checkpoints were deleted, the last time; the next sweep mends it."""
        self._lock = threading.Lock()
        """Held while the store is asked: never by training."""
        self._noting = threading.Lock()
        self._wake, self._over = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def claim(self) -> None:
        """Have the prefix.

        Raises:
            NanotrainError: another run has it.
        """
        with self._lock:
            self._claim()

    def _claim(self) -> None:
        self._before = take(self.store, self.own, lease=self.lease, sleep=self._sleep)
        self.claimed = True

    def _claim_late(self) -> None:
        """Have the prefix of a store that did not answer when the run began."""
        steps = [*map(step_of, look(self.store).complete())] if self.begins_anew else []
        if steps:
            raise holds_checkpoints(self.store, steps)
        self._claim()

    def _sleep(self, seconds: float) -> None:
        if self._over.wait(seconds):
            raise TimeoutError("the run is over")

    def leave_after(self, step: int) -> None:
        """Note that the run goes on from ``step``: what the store has of later ones is of another branch."""
        with self._noting:
            self.left.note(step)
        self._wake.set()

    def publish(self, stored: Stored, stale: Callable[[], bool]) -> str:
        """Complete a checkpoint whose files are all there; return what is wrong with them.

        Args:
            stored: what the marker is to say.
            stale: returns whether the run has gone back before it meanwhile.
        """
        with self._lock:
            self._tend()
            if stale():
                return "the run has gone back before it"
            there = self.store.sizes(stored.entry)
            if problems := missing(stored, there):
                return problems[0]
            self.store.put_bytes(f"{stored.entry}/{MARKER}", stored.text())
            return ""

    def sweep(self, newest: str, retention: Mapping[str, int | None]) -> None:
        """Delete what retention does not keep beside ``newest``, the folder of the newest checkpoint.

        Args:
            newest: was just completed.
            retention: see :class:`~nanotrain_object_store.staged.Staged`.
        """
        try:
            with self._lock:
                listing = look(self.store)
                gone = expendable(listing, keep=self.keep, newest=newest, retention=retention)
                self.sweep_problem = remove(self.store, listing, gone)
        except Exception as problem:
            self.sweep_problem = in_words(problem)

    # --- signs of life ------------------------------------------------------------------------

    def begin(self) -> None:
        """Give signs of life from now on."""
        self._thread = threading.Thread(target=self._live, name="object-store-owner", daemon=True)
        self._thread.start()

    def _live(self) -> None:
        while not self._over.is_set():
            try:
                with self._lock:
                    self._tend()
            except NanotrainError:
                return
            except Exception:
                pass
            self._wake.wait(self.lease / BEATS)
            self._wake.clear()

    def _tend(self) -> None:
        """Acquire the prefix if that is still to do, send a heartbeat, and delist abandoned checkpoints.

        The caller holds the lock.

        Raises:
            NanotrainError: the prefix belongs to another run; all later calls raise this as well.
        """
        if self.refused:
            raise NanotrainError(self.refused)
        try:
            if not self.claimed:
                self._claim_late()
            expect_ours(self.store, self.own, self._before)
        except NanotrainError as problem:
            self.refused = str(problem)
            raise
        self.own = attrs.evolve(self.own, beat=self.own.beat + 1)
        self.store.put_bytes(OWNER, self.own.text())
        after = self.left.after
        if after is not None:
            self.sweep_problem = supersede(self.store, after) or self.sweep_problem
            with self._noting:
                self.left.done(after)

    def end(self, patience: float) -> None:
        """Release the prefix within ``patience`` seconds: then the next run need not wait for the lease."""
        self._over.set()
        self._wake.set()
        if not self.claimed or self.refused:
            return

        def give_back() -> None:
            with self._lock:
                expect_ours(self.store, self.own, self._before)
                self.store.put_bytes(OWNER, attrs.evolve(self.own, ended=True).text())

        def try_to() -> None:
            with suppress(Exception):  # then the lease runs out
                give_back()

        thread = threading.Thread(target=try_to, daemon=True)
        thread.start()
        thread.join(patience)
