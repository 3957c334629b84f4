"""The ``memory`` monitor: how much of device and host is in use, what holds it, and whether it grows."""

from __future__ import annotations

import time

import torch

from nanotrain_core.api import Bins
from nanotrain_core.api.torch import EndReport, Monitor, RunInfo, StepReport, UpdateReport
from nanotrain_performance import MemoryConfig, host
from nanotrain_performance.accounts import weight_bytes
from nanotrain_performance.declared import RANKS_EVERY, USE_EVERY
from nanotrain_performance.windows import Growth

MiB = 2**20
#: Seconds between readings of the whole host's memory, each of which reads several files.
SELDOM = 10.0
#: Seconds between readings of values that hardly change.
OFTEN = 1.0
#: The peak that is reported for every rank: the first of these that is known, on a device or on a host.
PEAKS = ("allocated_peak", "host_peak")


class Memory(Monitor):
    """Reads memory in every step to detect growth; publishes allocator and system counts in some of them."""

    reads_weights = False

    def __init__(self, config: MemoryConfig) -> None:
        self.config = config

    def on_start(self, run: RunInfo) -> None:
        """Begin to look."""
        self.run, self.statm = run, host.Statm()
        self.resident: host.Resident | None = None
        self.on_host, self.on_device = Growth(), Growth()
        self.total, self.looked_at_host, self.looked = 0, -SELDOM, -OFTEN
        if run.device.type == "cuda":
            self.total = torch.cuda.get_device_properties(run.device).total_memory
        ranks = run.world_size
        self.bin = torch.tensor([float(run.rank)])
        self.bins = Bins(low=0.0, high=float(ranks), count=ranks)
        self.retries = torch.cuda.memory_stats(run.device)["num_alloc_retries"] if self.total else 0
        self.found: dict[str, float] = {}
        """Values of the last reading. Ranks read by their own clocks, but publish in the same steps."""
        self.in_use: float | None = None
        self.accounts: dict[str, int] = {}
        self.accounted = 0
        """Logged steps since the accounts were made."""
        self.reported = 0
        """Logged steps."""

    def on_before_update(self, update: UpdateReport) -> None:
        """Read memory at the same point of every step: gradients exist, and activations are freed."""
        self.resident = self.statm.read()
        if self.resident is not None:
            self.on_host.add(self.resident.own / MiB)
        if self.total:
            self.on_device.add(torch.cuda.memory_allocated(self.run.device) / MiB)
        if not update.logged:
            return
        if not self.accounts or self.accounted >= self.config.account_every:
            self.accounted = 0
            self.accounts = {
                "weights": weight_bytes(self.run.placed, self.run.parts),
                "gradients": update.gradient_bytes(),
                "optimizer": 0,
            }
        self.accounted += 1

    def on_step(self, report: StepReport) -> None:
        """Publish growth in every logged step, all other values in some."""
        if self.accounts and (self.accounted == 1 or not self.accounts["optimizer"]):
            self.accounts["optimizer"] = self.run.optimizer_device_bytes()  # there is none before an update
        if self.resident is not None:
            self._put("host_growth", self.on_host.per_step)
        if self.total:
            self._put("device_growth", self.on_device.per_step)
        if self.reported % USE_EVERY == 0 or report.step == self.run.steps:
            self._in_use()
        if self.reported % RANKS_EVERY == 0 or report.step == self.run.steps:
            for name, size in self.accounts.items():
                self._put(name, size / MiB)
            self._ranks()
        self.reported += 1

    def _in_use(self) -> None:
        """Publish what is in use; read it again if the last reading is a second old."""
        now = time.monotonic()
        if now - self.looked >= OFTEN:
            self.looked = now
            self._host(now)
            if self.total:
                self._device()
        for name, value in self.found.items():
            self._put(name, value)
        if self.in_use is not None:
            self.run.metrics.scalar("memory/host_fraction", self.in_use)

    def on_end(self, report: EndReport) -> None:
        """Close what is open."""
        self.statm.close()

    def _host(self, now: float) -> None:
        peak = host.peak()
        if self.resident is not None:
            self.found["host"] = self.resident.total / MiB
            peak = max(peak, self.resident.total)  # the system brings its own up to date now and then
        self.found["host_peak"] = peak / MiB
        if now - self.looked_at_host >= SELDOM:
            self.looked_at_host, self.in_use = now, host.share_in_use()

    def _device(self) -> None:
        stats = torch.cuda.memory_stats(self.run.device)  # one call: each takes a tenth of a millisecond
        for name in ("allocated", "reserved"):
            now, peak = (stats[f"{name}_bytes.all.{which}"] for which in ("current", "peak"))
            self.found[name] = now / MiB
            self.found[f"{name}_peak"] = peak / MiB
            self.found[f"{name}_fraction"] = peak / self.total
        held = sum(self.accounts.values())
        self.found["activations"] = max(0, stats["allocated_bytes.all.peak"] - held) / MiB
        before, self.retries = self.retries, stats["num_alloc_retries"]
        self.run.metrics.scalar("memory/retries", self.retries - before)

    def _ranks(self) -> None:
        """Publish the peak of every rank in one metric, whatever their number: bin n is rank n."""
        peak = next((self.found[name] for name in PEAKS if name in self.found), 0.0)
        self.run.metrics.histogram("memory/ranks", self.bin, bins=self.bins, weight=peak)

    def _put(self, name: str, value: float) -> None:
        self.run.metrics.per_rank(f"memory/{name}/{{over}}", value)
