"""The metrics of the ``stragglers`` monitor. Torch-free."""

from __future__ import annotations

from nanotrain_core.metrics.declared import Metric, rank_metrics

#: The quantities in which ranks are compared.
PHASES = ("data", "compute", "monitors", "link")

_WHAT = {
    "data": "seconds per step in which a rank loads data",
    "compute": "seconds per step of a rank's own work in forward, backward and the optimizer, without waits "
    "for others, over its pipeline stage's fraction of the FLOPs",
    "monitors": "seconds per step of a rank's own work in monitors",
    "link": "seconds that a message of 256 KiB takes from the rank before",
}

#: The metric for a sentence about a slow rank or link: reports show all health texts together.
SAID = "health/stragglers"

METRICS: tuple[Metric, ...] = (
    *(
        metric
        for phase, what in _WHAT.items()
        for metric in rank_metrics(f"stragglers/{phase}", what, unit="s", group="time", level="debug")
    ),
    Metric(
        name=SAID,
        unit="",
        group="health",
        kind="text",
        summary="the slow rank or link, and its phase; reported with the next logged step",
    ),
)
