"""Reads a GPU's state through NVML every few seconds, in a thread: it takes milliseconds. Torch-free."""

from __future__ import annotations

import contextlib
import threading
from types import ModuleType
from typing import Any

import structlog

MiB = 2**20


class Sampler(threading.Thread):
    """Averages each kind of reading until :meth:`take` is called."""

    def __init__(self, nvml: ModuleType, uuid: str, every: float) -> None:
        """Find the GPU.

        Args:
            nvml: the module ``pynvml``.
            uuid: of the GPU, as torch has it.
            every: seconds between two looks.

        Raises:
            Exception: NVML does not know it: its own errors.
        """
        super().__init__(name="nvml", daemon=True)
        self.nvml, self.every = nvml, every
        nvml.nvmlInit()
        self.handle = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        self._done, self._lock = threading.Event(), threading.Lock()
        self._sums: dict[str, tuple[float, int]] = {}

    def run(self) -> None:
        """Look until told to end, or until NVML fails: that is logged once."""
        while not self._done.wait(self.every):
            try:
                self.look()
            except Exception as error:  # as of a library that was replaced under the run
                text = "the monitor 'device' reads no more of this rank's GPU: NVML failed, and device/* ends"
                structlog.get_logger("nanotrain.device").warning(
                    text, error=f"{type(error).__name__}: {error}"
                )
                return

    def stop(self) -> None:
        """End."""
        self._done.set()
        if self.is_alive():
            self.join()
        with contextlib.suppress(Exception):
            self.nvml.nvmlShutdown()

    def look(self) -> None:
        """Add one reading of each kind that this GPU has.

        Raises:
            Exception: one that is not NVML's own, as of a library that lacks a function.
        """
        nvml, handle = self.nvml, self.handle
        readings: dict[str, Any] = {
            "utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "memory": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used / MiB,
            "power": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "temperature": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "clock": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        }
        for name, read in readings.items():
            with contextlib.suppress(nvml.NVMLError):  # not every GPU tells all
                value = float(read())
                with self._lock:
                    total, count = self._sums.get(name, (0.0, 0))
                    self._sums[name] = total + value, count + 1

    def take(self) -> dict[str, float]:
        """Return the mean of each kind of reading since the last call, without kinds that have none."""
        with self._lock:
            sums, self._sums = self._sums, {}
        return {name: total / count for name, (total, count) in sums.items()}
