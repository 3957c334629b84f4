"""The ``guard`` monitor: detects when training goes wrong, and requests a rollback to before it did.

A step is *bad* when its loss is NaN, when it was skipped though no loss scale was too large,
or when its loss is a spike: far above the median of the last good losses, measured in robust standard
deviations. Median and median absolute deviation tolerate up to half of the window being outliers, and a
bad loss never enters the window, so that neither a NaN nor the spike itself desensitises the detector.

Every rank reads the same global values, and so decides the same.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

from nanotrain_core.builtin.configs import GuardConfig
from nanotrain_core.contracts import Monitor, RollbackReport, StepReport
from nanotrain_core.errors import Diverged
from nanotrain_core.run.stop import Rollback

#: Converts a median absolute deviation into the standard deviation of a normal distribution.
MAD_TO_SIGMA = 1.4826
#: A deviation smaller than this fraction of the median is rounding, not noise.
LEAST_SHARE = 0.01


class Guard(Monitor):
    """See :class:`~nanotrain_core.builtin.configs.GuardConfig`."""

    every_step = True

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.good: deque[float] = deque(maxlen=config.window)
        self.bad: list[str] = []
        """The problem of each of the last consecutive bad steps."""
        self.rollbacks = 0

    def on_step(self, report: StepReport) -> Rollback | None:
        """Judge one step.

        Raises:
            Diverged: ``max_rollbacks`` rollbacks have not helped.
        """
        problem = self.judge(report)
        if problem is None:
            self.bad.clear()
            self.good.append(loss_of(report))
            return None
        self.bad.append(problem)
        if len(self.bad) < self.config.patience:
            return None
        first = report.step - len(self.bad) + 1
        text = f"step {first}: {self.bad[0]}, {len(self.bad)} bad steps in a row"
        if self.rollbacks >= self.config.max_rollbacks:
            raise Diverged(f"{text}; given up after {self.rollbacks} rollbacks")
        return Rollback(max(1, first - self.config.margin), text)

    def judge(self, report: StepReport) -> str | None:
        """Return what is wrong with a step, None if nothing is."""
        if not math.isfinite(report.loss):
            return f"the loss was {report.loss}"
        if report.skipped and report.loss_scale == 1.0:
            return f"the gradient norm was {report.grad_norm}"
        if len(self.good) < self.config.warmup:
            return None
        found = loss_of(report)
        middle = median(self.good)
        sigma = MAD_TO_SIGMA * median(abs(loss - middle) for loss in self.good)
        limit = middle + self.config.threshold * max(sigma, LEAST_SHARE * abs(middle))
        return f"the loss rose to {found:.4g}, from {middle:.4g}" if found > limit else None

    def suspect_steps(self) -> int:
        """Return the bad steps so far and those before the first, or next, bad one."""
        return self.config.margin + len(self.bad)

    def on_rollback(self, report: RollbackReport) -> None:
        """Restart from the state at that time."""
        self.bad.clear()
        self.rollbacks = report.count

    def meta(self) -> dict[str, Any]:
        """Return the window and the count, with which a resumed run continues."""
        return {"good": list(self.good), "bad": list(self.bad), "rollbacks": self.rollbacks}

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Restore a window, which may have been longer."""
        self.good.clear()
        self.good.extend(meta["good"])
        self.bad, self.rollbacks = list(meta["bad"]), int(meta["rollbacks"])


def loss_of(report: StepReport) -> float:
    """Return the loss to compare between steps: the language model's loss, if the model has that term.

    The sum of all terms jumps where a phase changes their weights.
    """
    return report.losses.get("lm", report.loss)
