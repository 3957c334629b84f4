"""Loss scaling: none, or the dynamic scale of fp16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nanotrain_core.builtin.configs import LARGEST_SCALE


class NoLossScale:
    """For dtypes with float32's range: the loss is not scaled."""

    value = 1.0

    def update(self, skipped: bool | torch.Tensor) -> None:
        """Do nothing, and so read nothing from the device."""

    def meta(self) -> dict[str, Any]:
        """Return no state."""
        return {}

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Restore nothing."""


class DynamicLossScale:
    """Doubles after ``growth_interval`` steps without overflow, halves at an overflow.

    Every rank sees the same global gradient norm, so all decide the same without communication.

    Source: Micikevicius et al., arXiv 1710.03740, section 3.2.
    """

    def __init__(self, initial: float, growth_interval: int) -> None:
        self.value = initial
        self.growth_interval = growth_interval
        self.good_steps = 0

    def update(self, skipped: bool | torch.Tensor) -> None:
        """Update the scale from the last step's overflow: the next loss depends on it, so the host waits."""
        if skipped:
            self.value, self.good_steps = max(self.value / 2, min(self.value, 1.0)), 0
            return
        self.good_steps += 1
        if self.good_steps >= self.growth_interval:  # a resumed run may have another interval
            self.value, self.good_steps = min(self.value * 2, LARGEST_SCALE), 0

    def meta(self) -> dict[str, Any]:
        """Return the scale and the steps since it last changed."""
        return {"value": self.value, "good_steps": self.good_steps}

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Restore a saved scale."""
        self.value = meta.get("value", self.value)
        self.good_steps = meta.get("good_steps", 0)
