"""Small runs with the health monitors, in which something may be made wrong on purpose."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from nanotrain_core.api.torch import MetricsReport, Monitor
from nanotrain_core.engine import RuntimeEngine
from nanotrain_core.errors import Diverged
from nanotrain_core.recipe.merge import merge_tables
from nanotrain_core.testing import Case
from nanotrain_core.testing.probe import make_engine

MONITORS = [{"use": "moe"}, {"use": "probes", "every": 5, "sequences": 2}]
MODEL = {"layers": 4, "width": 64, "heads": 4, "vocab": 64, "init_std": 0.02}
ADAMW = {"use": "adamw", "lr": 3e-3, "clip_norm": 1.0, "lr_schedule": {"use": "cosine", "warmup_steps": 5}}

Plant = Callable[[RuntimeEngine], None]


class Told(Monitor):
    """Keeps what is told."""

    def __init__(self) -> None:
        self.reports: list[MetricsReport] = []

    def on_metrics(self, report: MetricsReport) -> None:
        self.reports.append(report)

    @property
    def sentences(self) -> list[str]:
        return [report.texts["health"] for report in self.reports if "health" in report.texts]


def run(changes: dict[str, Any], plant: Plant = lambda engine: None, steps: int = 20, **config: Any) -> Told:
    """Train and return what was told. ``config``: of the monitor."""
    around = {
        "batch": {"sequences": 16, "microbatch": 8, "length": 64},
        "model": MODEL,
        "optimizer": ADAMW,
        "precision": {"use": "fp32"},
        "monitor": MONITORS,
        "data": {"use": "synthetic", "vocab": 64, "sequences": 512, "validation_sequences": 16},
    }
    case, told = Case("monitor", use="health", config=config, overrides=around), Told()
    engine = make_engine(case, merge_tables(changes, {"run": {"steps": steps}}), callbacks=[told])
    plant(engine)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of so small a model more would wait for one another
    try:
        with suppress(Diverged):  # some troubles end the run, after what is told of them
            engine.fit()
    finally:
        torch.set_num_threads(threads)
    return told
