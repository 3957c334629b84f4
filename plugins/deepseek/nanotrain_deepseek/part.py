"""Consecutive layers of the model, with the embedding and the head where they belong.

Shapes: B batch, S sequence, D width, V vocabulary.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from nanotrain_core.api import Part, Role, tag
from nanotrain_core.api.models import RoutingStatistics, count_routed
from nanotrain_core.api.torch import Batch, Head, Initializer, ModelPart, Ops, PartOutput, Rotation
from nanotrain_deepseek.block import Block, norm
from nanotrain_deepseek.config import DeepSeekConfig
from nanotrain_deepseek.mtp import Predictor
from nanotrain_deepseek.yarn import rotation


class DeepSeekPart(ModelPart):
    """Layers numbered as in the whole model.

    The part with the head needs the embedding table too if it is tied, or if further tokens are predicted. It
    holds its own copy when the first part is on another rank, under the same name.
    """

    def __init__(self, config: DeepSeekConfig, part: Part, ops: Ops) -> None:
        super().__init__()
        self.config, self.part = config, part
        if part.has_embedding or (part.has_head and (config.tied or config.mtp)):
            self.embed = tag(nn.Embedding(config.vocab, config.width), Role.VOCAB)
        self.layers = nn.ModuleDict(
            {str(n): Block(config, ops, dense=n < config.dense_layers) for n in range(part.first, part.last)}
        )
        if part.has_head:
            self.norm = norm(config, ops)
            self.head = tag(Head(config.vocab, config.width, tied=config.tied, ops=ops), Role.HEAD)
            self.mtp = nn.ModuleList(Predictor(config, ops) for _ in range(config.mtp))

    def forward(self, inputs: torch.Tensor, batch: Batch) -> PartOutput:
        """Run tokens [B, S], or hidden states [B, S, D] of the previous part, through the layers.

        The sequence length is the batch's: a wrapper may have left this rank a part of each sequence.
        """
        losses: dict[str, torch.Tensor] = {}
        x_BSD = self._embed(inputs, batch.start) if self.part.has_embedding else inputs
        cos_sin = rotation(batch.tokens.shape[1], self.config, like=x_BSD, start=batch.start)
        for number, layer in self.layers.items():
            x_BSD, routed = layer(x_BSD, cos_sin, batch.cache_of(number), batch.document_starts)
            self._count(layer, routed, losses)
        if not self.part.has_head:
            return PartOutput(x_BSD, losses)
        x_BSD = self.norm(x_BSD)
        output = self._head(x_BSD, batch.targets)
        if batch.targets is None:
            return PartOutput(output)
        if self.training and self.config.mtp:
            losses["mtp"] = self._predict_further(x_BSD, batch, cos_sin, losses)
        return PartOutput(None, {"lm": output, **losses})

    def _count(
        self, layer: nn.Module, routed: RoutingStatistics | None, losses: dict[str, torch.Tensor]
    ) -> None:
        if routed is not None:
            count_routed(routed, cast(Block, layer).moe.router, losses)

    def _embed(self, tokens_BS: torch.Tensor, start: int) -> torch.Tensor:
        end, limit = start + tokens_BS.shape[1], self.config.max_length
        if limit and end > limit:
            raise ValueError(f"a sequence of {end} tokens exceeds the model's max_length = {limit}")
        x_BSD: torch.Tensor = self.embed(tokens_BS)
        return x_BSD

    def _head(self, x_BSD: torch.Tensor, targets_BS: torch.Tensor | None) -> torch.Tensor:
        # The head receives the table as an argument: `to_empty` would untie a shared Parameter.
        out: torch.Tensor = self.head(x_BSD, targets_BS, self.embed.weight if self.config.tied else None)
        return out

    def _predict_further(
        self,
        h_BSD: torch.Tensor,
        batch: Batch,
        cos_sin: Rotation,
        losses: dict[str, torch.Tensor],
    ) -> torch.Tensor:
        """Return the summed cross-entropies of all depths; the first starts from what the head receives."""
        found = []
        for depth, predictor in enumerate(self.mtp, start=1):
            later = batch.shifted(depth)
            embedded_BSD = self.embed(later.tokens)
            h_BSD, routed = predictor(h_BSD, embedded_BSD, cos_sin, batch.document_starts)
            self._count(cast(Predictor, predictor).block, routed, losses)
            found.append(self._head(h_BSD, later.targets))
        return torch.stack(found).sum()

    def initializer(self, name: str) -> Initializer:
        """Return ones for norms, zeros for the routers' bias, one normal for everything else.

        Source: DeepSeek-V3, section 4.2: 0.006 for every learnable parameter.
        """
        if name.endswith("norm.weight"):
            return Initializer("constant", 1.0)
        if name.endswith("router.bias"):
            return Initializer("constant", 0.0)
        return Initializer("normal", self.config.init_std)
