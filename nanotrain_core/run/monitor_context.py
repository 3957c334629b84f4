"""The monitors' environment for one call of ``fit``: their metrics reducer, collectives and taps."""

from __future__ import annotations

from nanotrain_core.compose import Run
from nanotrain_core.contracts import RunInfo
from nanotrain_core.registry.contract_checks import check_callback
from nanotrain_core.run.events import Events
from nanotrain_core.run.monitor_collectives import MonitorCollectives, MonitorMesh
from nanotrain_core.run.taps import Taps


class MonitorContext:
    """Created for each call of ``fit``, with the monitors present at that time."""

    def __init__(self, run: Run, events: Events) -> None:
        """Collective: all ranks have the same monitors.

        Raises:
            PluginError: one of them could not be called.
        """
        for monitor in run.monitors:
            check_callback(monitor)
        self.events = events
        self.reducer = events.reducer_on(run.mesh)
        self.collectives = MonitorCollectives(run.mesh, len(events.monitors))
        self.mesh = MonitorMesh(run.mesh, self.collectives)
        self.taps = Taps(run.stages.values(), run.passes, self.collectives, events.fail_later)

    def start(self, info: RunInfo) -> None:
        """Deliver ``on_start``. If that ends the run, no tap stays on the model. Collective."""
        try:
            self.events.start(info, self.reducer, self.collectives)
        except BaseException:
            self.taps.remove()
            raise
        self.taps.left_out = self.events.left_out
