"""What held a GPU's memory when it ran out: torch's allocation history, written at that moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import structlog
import torch

#: Newest allocations that are kept, each with Python's stack: about 300 bytes of host memory.
KEPT = 100_000


class MemorySnapshot:
    """Writes ``memory/rank3.pickle`` in the run folder when an allocation fails on this rank's GPU.

    The file is for https://pytorch.org/memory_viz, which reads it in the browser. Only the Python stacks of
    allocations are recorded, 2 microseconds each according to torch; C++ frames would take as long again.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        """Begin to record the history of allocations, until :meth:`stop`."""
        self.folder, self.rank, self.recording = folder, rank, True
        memory: Any = torch.cuda.memory
        memory._record_memory_history(enabled="all", context="alloc", stacks="python", max_entries=KEPT)
        internals: Any = torch._C
        internals._cuda_attach_out_of_memory_observer(self._write)

    def stop(self) -> None:
        """Stop recording and free the history. torch cannot detach the observer, which now does nothing."""
        if self.recording:
            self.recording = False
            memory: Any = torch.cuda.memory
            memory._record_memory_history(enabled=None)

    def _write(self, device: int, wanted: int, held: int, free: int) -> None:
        if not self.recording:
            return
        path = self.folder / "memory" / f"rank{self.rank}.pickle"
        path.parent.mkdir(parents=True, exist_ok=True)
        memory: Any = torch.cuda.memory
        memory._dump_snapshot(str(path))
        structlog.get_logger("nanotrain.profiler").error(
            "out of memory: drop the snapshot on https://pytorch.org/memory_viz",
            path=str(path),
            wanted_mb=round(wanted / 1e6, 1),
            free_mb=round(free / 1e6, 1),
        )
