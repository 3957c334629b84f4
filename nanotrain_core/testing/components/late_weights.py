"""An optimizer whose updated weights arrive only when they are waited for, and are NaN until then."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import nn

from nanotrain_core.contracts import Optimizer


class LateWeights(Optimizer):
    """Returns early, like an optimizer that overlaps communication with the next forward."""

    returns_early = True

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        self.parameters = {p for part in parts for p in part.parameters() if p.requires_grad}
        self.travelling: dict[nn.Parameter, torch.Tensor] = {}

    def send(self) -> None:
        """Put every weight in flight."""
        for parameter in self.parameters:
            self.travelling[parameter] = parameter.detach().clone()
            parameter.data.fill_(torch.nan)

    def wait(self, parameters: Collection[nn.Parameter]) -> None:
        """Make ``parameters`` arrive."""
        for parameter in parameters:
            if parameter in self.travelling:
                parameter.data.copy_(self.travelling.pop(parameter))
