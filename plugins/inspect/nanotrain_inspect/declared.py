"""The metrics that ``dump`` publishes of tensors it does not write. Torch-free."""

from typing import Literal

from nanotrain_core.api import Metric

Statistic = Literal["norm", "rms", "mean", "std", "max_abs"]

#: Statistics of tensors with a placement, and of what modules return; each element counts once.
PLACED: tuple[Statistic, ...] = ("norm", "rms", "mean", "std", "max_abs")
RETURNED: tuple[Statistic, ...] = ("rms", "mean", "std", "max_abs")

_SUMMARIES = {
    "norm": "2-norm",
    "rms": "root of the mean square",
    "mean": "mean",
    "std": "standard deviation",
    "max_abs": "largest magnitude",
}
_OF = {
    "weights": "a weight, as the step computed with it",
    "gradients": "a complete gradient, before clipping",
    "updates": "what the step added to a weight",
    "activations": "what a module returned in the step's forward passes",
}

METRICS = tuple(
    Metric(
        name=f"dump/{what}/{statistic}/{{name}}",
        unit="1",
        group="dump",
        level="debug",
        cost="layers" if what == "activations" else "weights",
        summary=f"{_SUMMARIES[statistic]} of {of}",
    )
    for what, of in _OF.items()
    for statistic in (RETURNED if what == "activations" else PLACED)
)
