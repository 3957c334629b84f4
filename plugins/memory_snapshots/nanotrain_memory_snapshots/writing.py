"""One snapshot in progress: a thread copies, seals and sends it while the next step is computed.

Only an update modifies what is copied, so forward and backward need not wait, and the update waits for all of
it: from then on the previous step is stored twice.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import attrs

from nanotrain_core.api.torch import TrainState
from nanotrain_memory_snapshots import ring
from nanotrain_memory_snapshots.payload import Form, computed
from nanotrain_memory_snapshots.seal import Moment, Seal
from nanotrain_memory_snapshots.slot import Slot, checksum, to_write


@attrs.define(frozen=True, eq=False)
class Places:
    """The destinations of a rank's snapshots."""

    rank: int
    own: list[Slot]
    others: list[Slot]
    """For the rank whose neighbor this one is."""
    group: Any = None
    """None without a neighbor."""
    to: int = 0
    source: int = 0


class Writing:
    """The most recent snapshot."""

    def __init__(self, places: Places, state: TrainState, moment: Moment) -> None:
        self.places, self.state, self.moment = places, state, moment
        self.seconds = 0.0
        """Its duration."""
        self.problem = ""
        """Why this rank has no snapshot of this step."""
        self.broken = ""
        """Why the send/recv failed: most likely ranks are gone."""
        self._began, self._form = time.monotonic(), Form.of(state)
        self._after = computed(self._form.tensors)
        self._thread = threading.Thread(target=self._work, name="memory-snapshots", daemon=True)
        self._thread.start()

    def join(self) -> float:
        """Wait until it is done, and return the seconds waited."""
        began = time.monotonic()
        self._thread.join()
        return time.monotonic() - began

    def _work(self) -> None:
        text, payload = b"", None
        try:
            text, payload = self._write()
        except Exception as problem:
            self.problem = f"{type(problem).__name__}: {problem}"
        try:
            self._exchange(text, payload)
        except Exception as problem:
            self.broken = f"{type(problem).__name__}: {problem}"
        self.seconds = time.monotonic() - self._began

    def _write(self) -> tuple[bytes, Any]:
        form, moment = self._form, self.moment
        slot = to_write(self.places.own)
        payload = slot.begin(form.nbytes)
        form.write(payload, self._after)
        seal = Seal(
            rank=self.places.rank,
            moment=moment,
            form=form.checksum,
            nbytes=form.nbytes,
            checksum=checksum(payload),
            meta=self.state.meta,
        )
        text = seal.text()
        slot.close(text, moment)
        return text, payload

    def _exchange(self, text: bytes, payload: Any) -> None:
        at = self.places
        if at.group is None:
            return
        sent = ring.send(at.group, at.to, text, payload)
        ring.receive(at.group, at.source, to_write(at.others), self.moment)
        ring.wait(sent)
