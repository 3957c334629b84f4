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
    """Seconds per step and tokens per second since the last measurement or restart."""

    def __init__(self) -> None:
        self.restart(0, 0)

    def restart(self, step: int, tokens: int) -> None:
        """Measure from here, at this total of steps and tokens: the time before was not training."""
        self._began, self._step, self._tokens = time.monotonic(), step, tokens

    def since(self, step: int, tokens: int, *, restart: bool = True) -> tuple[float, float]:
        """Return seconds per step and tokens per second since the last restart.

        With ``restart``, measure from here afterwards.
        """
        elapsed = max(time.monotonic() - self._began, 1e-9)
        found = elapsed / max(1, step - self._step), (tokens - self._tokens) / elapsed
        if restart:
            self.restart(step, tokens)
        return found
