"""The monitors' environment for one call of ``fit``: their metrics reducer, collectives and observers."""

from __future__ import annotations

from nanotrain_core.compose import Run
from nanotrain_core.contracts import RunInfo
from nanotrain_core.registry.contract_checks import check_callback
from nanotrain_core.run.events import Events
from nanotrain_core.run.module_observers import ModuleObservers
from nanotrain_core.run.monitor_collectives import MonitorCollectives, MonitorMesh


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
        self.observers = ModuleObservers(run.stages.values(), run.passes, self.collectives, events.fail_later)

    def start(self, info: RunInfo) -> None:
        """Deliver ``on_start``. If that ends the run, no observer stays on the model. Collective."""
        try:
            self.events.start(info, self.reducer, self.collectives)
        except BaseException:
            self.observers.remove()
            raise
        self.observers.left_out = self.events.left_out
