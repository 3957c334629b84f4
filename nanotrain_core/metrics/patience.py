"""Which values are judged by their rules, and for how long one must be outside before it is reported.
Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from nanotrain_core.metrics.declared import Metric

#: Consecutive logged steps for which a value must be worth a warning before it is reported. A monitor may be
#: configured with another number.
PATIENCE = 5
#: Consecutive logged steps for which a value must be bad before it is reported, unless patience is less.
BAD_LASTS = 2
#: Metric groups that are not judged in a step that was skipped under loss scaling: too large a loss scale
#: makes gradients overflow, and then only the overflow itself is worth reporting.
OF_GRADIENTS = frozenset({"gradients", "updates", "weights"})

#: ``broken``: the loss is not finite; ``overflow``: the step was skipped to halve the loss scale.
StepKind = Literal["normal", "broken", "overflow"]


def step_kind(values: Mapping[str, float]) -> StepKind:
    """Return what is to be known of a logged step for judging its metrics, from its values by name.

    >>> step_kind({"loss": 2.0, "skipped": 1.0, "loss_scale": 1024.0}), step_kind({"loss": math.nan})
    ('overflow', 'broken')
    """
    if not math.isfinite(values.get("loss", 0.0)):
        return "broken"
    return "overflow" if values.get("skipped") and values.get("loss_scale", 1.0) != 1.0 else "normal"


def is_judged(metric: Metric, kind: StepKind) -> bool:
    """Return whether a metric is judged in such a step."""
    # Beside a loss that is not finite, no other number means anything.
    if kind == "broken":
        return metric.name == "loss"
    return kind == "normal" or metric.group not in OF_GRADIENTS


def required_patience(value: float, patience: int, *, bad: bool) -> int:
    """Return the consecutive logged steps for which such a value must be outside its rule to be reported."""
    if not math.isfinite(value):
        return 1
    return min(BAD_LASTS, patience) if bad else patience
