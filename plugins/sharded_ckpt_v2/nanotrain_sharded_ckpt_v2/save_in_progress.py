"""A save in progress: a thread copies this rank's shard, then writes it, while training continues.

Nothing modifies weights or optimizer state before the next update, so forward and backward of the next step
need not wait for the copy: only that update waits, for the rest of it.

Source of the idea: Mohan et al., "CheckFreq: Frequent, Fine-Grained DNN Checkpointing", FAST 2021 (snapshots
overlapped with the next iteration, up to its update).
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from nanotrain_core.api.torch import TrainState
from nanotrain_sharded_ckpt_v2 import blocks
from nanotrain_sharded_ckpt_v2.manifest import File, streams_name

#: By file, the tensors that this rank writes to it.
Shares = Mapping[str, blocks.Tensors]


@attrs.define(eq=False)
class SaveInProgress:
    """A save that has begun."""

    step: int
    rank: int
    scratch: Path
    state: TrainState
    """Kept: the tensors being copied must stay in memory, and the rest is written."""
    began: float
    old: Sequence[Path] = ()
    """Folders to delete first."""
    blocked: float = 0.0
    """Seconds for which training was blocked."""
    files: dict[str, File] = attrs.field(factory=dict)
    """What this rank has linked or written."""
    error: str = ""
    _thread: threading.Thread | None = None
    _copied: threading.Event = attrs.field(factory=threading.Event)

    def write_in_thread(self, shares: Shares, copies: blocks.Copies) -> None:
        """Copy and write in a thread. Tensors must not change before :meth:`settle` has returned."""
        tensors = {key: tensor for share in shares.values() for key, tensor in share.items()}
        computed = blocks.computed(tensors)

        def work() -> None:
            try:
                held = copies.take(tensors, computed)
            except Exception as error:  # out of memory, for example
                self._failed(f"the share of rank {self.rank}", error)
                return
            finally:
                self._copied.set()
            self.write({name: {key: held[key] for key in share} for name, share in shares.items()})

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def write(self, shares: Shares) -> None:
        """Write this rank's files, and its streams. Must not communicate: it may run in the thread."""
        for folder in self.old:
            shutil.rmtree(folder, ignore_errors=True)  # the next run removes what is left
        name = ""
        try:
            for name, share in (*shares.items(), (streams_name(self.rank), self.state.rank_tensors)):
                if share:
                    self.files[name] = blocks.write(self.scratch / name, share)
        except Exception as error:
            self._failed(name, error)

    def _failed(self, what: str, error: Exception) -> None:
        self.error = f"{what} of step {self.step} could not be written to {self.scratch.parent}: {error}"

    def settle(self) -> None:
        """Wait until everything is copied."""
        if self._thread:
            began = time.monotonic()
            self._copied.wait()
            self.blocked += time.monotonic() - began

    def join(self) -> None:
        """Wait until everything is written."""
        if self._thread:
            self._thread.join()

    @property
    def busy(self) -> bool:
        """Whether this rank is still writing."""
        return self._thread is not None and self._thread.is_alive()
