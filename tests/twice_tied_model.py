"""``twice_tied``: a model whose first and last stage both hold two tensors, each in an order of its own.

The embedding is tied to the head, and ``gain`` [D] multiplies what the embedding returns and what the head
reads. A part with the embedding registers it before ``gain``, one without after it.
"""

from __future__ import annotations

import torch
from torch import nn

from nanotrain_core import hookimpl
from nanotrain_core.api import Component, Part
from nanotrain_core.api.torch import Batch, Initializer, Ops, PartOutput
from nanotrain_core.builtin.transformer_config import TransformerConfig
from nanotrain_core.models.ops import TORCH_OPS
from nanotrain_core.models.transformer import Transformer, TransformerPart


@hookimpl
def nanotrain_register_model(register):
    """Register ``twice_tied``."""
    register(
        Component(
            name="twice_tied",
            config=TransformerConfig,
            factory=f"{__name__}:TwiceTied",
            summary="two tensors that two stages hold, in different orders",
        )
    )


class Gain(nn.Module):
    """A vector [D]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))


class TwiceTied(Transformer):
    """A transformer, and ``gain`` at either end."""

    def build(self, part: Part, ops: Ops = TORCH_OPS) -> nn.Module:
        """Return the part on ``meta``."""
        with torch.device("meta"):
            return TwiceTiedPart(self.config, part, ops)


class TwiceTiedPart(TransformerPart):
    """Layers, with ``gain`` where there is embedding or head."""

    def __init__(self, config: TransformerConfig, part: Part, ops: Ops) -> None:
        super().__init__(config, part, ops)
        if part.has_embedding or part.has_head:
            self.gain = Gain(config.width)
        if not part.has_embedding and part.has_head:
            table = self.embed
            del self.embed
            self.embed = table

    def forward(self, inputs: torch.Tensor, batch: Batch) -> PartOutput:
        """Run the part."""
        if self.part.has_embedding:
            inputs = self.embed(inputs) * self.gain.weight
        x_BSD, cos_sin = inputs, self._rotation(batch, inputs)
        for layer in self.layers.values():
            x_BSD = layer(x_BSD, cos_sin)
        if not self.part.has_head:
            return PartOutput(x_BSD)
        output = self.head(self.norm(x_BSD * self.gain.weight), batch.targets, self.embed.weight)
        return PartOutput(output) if batch.targets is None else PartOutput(None, {"lm": output})

    def initializer(self, name: str) -> Initializer:
        """Return the normal of matrices for ``gain`` too: two holders that drew apart would be seen."""
        return Initializer("normal", 1.0) if name == "gain.weight" else super().initializer(name)
