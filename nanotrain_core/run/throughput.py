"""Measures a run's throughput, excluding everything that is not training."""

from __future__ import annotations

import time

#: Dense bfloat16 FLOP/s of GPUs, by a substring of their names, the first that matches: NVIDIA's data sheets,
#: without sparsity.
PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200 NVL": 835e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100": 989e12,
    "H800 PCIe": 756e12,
    "H800": 989e12,
    "GB200": 2500e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
}


def peak_flops(device: str) -> float | None:
    """Return the dense bfloat16 FLOP/s of the GPU of this name, None if it is not known."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name in device), None)


class Throughput:
    """Means over the steps since the last measurement or restart, of which phases may change the batch."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Measure from here: the time before was not training."""
        self._began, self._sums = time.monotonic(), [0.0] * 4

    def add(self, tokens: int, length: int | None, flops_per_token: float) -> None:
        """Add a step: the tokens of its batch, in sequences of this length, if it is known."""
        step = 1, tokens, tokens / length if length else 0.0, tokens * flops_per_token
        self._sums = [sum(pair) for pair in zip(self._sums, step, strict=True)]

    def since(self, *, restart: bool = True) -> tuple[float, float, float, float]:
        """Return seconds per step, tokens and sequences per second, and FLOPs per token.

        With ``restart``, measure from here afterwards.
        """
        elapsed = max(time.monotonic() - self._began, 1e-9)
        steps, tokens, sequences, flops = self._sums
        if restart:
            self.restart()
        return elapsed / max(1, steps), tokens / elapsed, sequences / elapsed, flops / max(1, tokens)
