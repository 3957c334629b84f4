"""The ``device`` monitor: utilization, memory, power, temperature and clock of each rank's GPU, by NVML."""

from __future__ import annotations

import importlib

import structlog
import torch

from nanotrain_core.api.torch import EndReport, Monitor, RunInfo, StepReport
from nanotrain_performance import DeviceConfig
from nanotrain_performance.nvml import Sampler

INSTALL = "the monitor 'device' reads NVML, which is not installed: pip install 'nanotrain-performance[nvml]'"


class Device(Monitor):
    """Publishes what a thread has read. Silent where no rank computes on a GPU of NVIDIA's."""

    reads_weights = False

    def __init__(self, config: DeviceConfig) -> None:
        self.config = config
        self.sampler: Sampler | None = None
        self.known: dict[str, float] = {}
        """The last reading of each kind. Threads read at any time, but ranks publish in the same steps."""

    def on_start(self, run: RunInfo) -> None:
        """Begin to look at the GPU; warn on rank 0 if nothing can."""
        self.run = run
        if run.device.type == "cuda":
            self.sampler = self._open()
        if self.sampler is not None:
            self.sampler.start()

    def _open(self) -> Sampler | None:
        problem = ""
        try:
            nvml = importlib.import_module("pynvml")
            uuid = str(torch.cuda.get_device_properties(self.run.device).uuid)
            sampler = Sampler(nvml, uuid, self.config.every_seconds)
            sampler.look()  # the first logged step has readings of all ranks
            return sampler
        except ImportError:
            problem = INSTALL
        except Exception as error:  # its library is another version, or may not be used in this container
            problem = f"the monitor 'device' cannot read NVML: {error}"
        if self.run.rank == 0:
            structlog.get_logger("nanotrain.device").warning(problem)
        return None

    def on_step(self, report: StepReport) -> None:
        """Publish what was read since the last logged step, else before; nothing once NVML has failed."""
        if self.sampler is None or not self.sampler.is_alive():
            return
        self.known |= self.sampler.take()
        for name, value in self.known.items():
            self.run.metrics.per_rank(f"device/{name}/{{over}}", value)

    def on_end(self, report: EndReport) -> None:
        """End the thread."""
        if self.sampler is not None:
            self.sampler.stop()
            self.sampler = None
