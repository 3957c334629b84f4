"""Copies batches to the device, overlapped with its computation."""

from __future__ import annotations

from typing import Any

import torch

from nanotrain_core.batch import Batch


class Upload:
    """Copies batches to one device.

    On a GPU it copies through pinned memory, on a separate stream. The host is ahead of the device: while the
    device still computes the last step, the next step's tokens are copied, and no stream waits for anything
    else.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = None

    def __call__(self, batch: Batch) -> Batch:
        """Return ``batch`` on the device, ready for whatever the current stream computes from now on."""
        if self.device.type != "cuda" or any(each.device.type != "cpu" for each in batch.tensors()):
            return batch.to(self.device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            moved = batch.pinned().to(self.device)
        now = torch.cuda.current_stream(self.device)
        now.wait_stream(self._stream)
        for each in moved.tensors():
            each.record_stream(now)  # keeps its memory from being reused before that stream has used it
        return moved
