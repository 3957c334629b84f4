"""Measures a run's throughput, excluding everything that is not training."""

from __future__ import annotations

import re
import time

#: Dense bfloat16 FLOP/s of GPUs, by a part of their names, the first that matches: NVIDIA's data sheets
#: and architecture whitepapers, without sparsity, with sums in float32.
PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200 NVL": 835e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100": 989e12,
    "H800 PCIe": 756e12,
    "H800": 989e12,
    "H20": 148e12,
    "GB300": 2500e12,
    "GB200": 2500e12,
    "B300": 2250e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "A30": 165e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 6000 Ada": 364e12,
    "RTX A6000": 154.8e12,
    "GeForce RTX 5090": 209.5e12,
    "GeForce RTX 4090": 165.2e12,
    "GeForce RTX 3090": 71e12,
}


def peak_flops(device: str) -> float | None:
    """Return the dense bfloat16 FLOP/s of the GPU of this name, None if it is not known.

    A GeForce has the whole name: a ``Laptop GPU``, ``Ti`` or ``D`` is another chip. So is an RTX ``A3000``,
    which has the letters of an ``A30``.
    """
    for name, peak in PEAK_FLOPS.items():
        last = "$" if name.startswith("GeForce") else r"(?!\d)"
        if re.search(re.escape(name) + last, device):
            return peak
    return None


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
