"""Mixtral, Qwen2-MoE and Qwen3-MoE: the core's transformer, with experts in place of feed-forward layers.

Shapes: B batch, S sequence, D width, E experts, K chosen per token.

Sources: Jiang et al., arXiv 2401.04088 (Mixtral); Yang et al., arXiv 2407.10671 (Qwen2) and
arXiv 2505.09388 (Qwen3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import torch
from torch import nn

from nanotrain_core.api import Costs, Part, Role, TransformerConfig, tag
from nanotrain_core.api.models import (
    CallOnce,
    Experts,
    RoutingStatistics,
    TopKRouter,
    Transformer,
    TransformerBlock,
    TransformerPart,
    count_routed,
    load_balancing_loss,
)
from nanotrain_core.api.torch import TORCH_OPS, Batch, Initializer, LayerCache, Ops, Rotation, SwiGLU
from nanotrain_moe_transformer.config import MoETransformerConfig


class MoETransformer(Transformer):
    """Dimensions and parts of the model. See :class:`~nanotrain_core.api.torch.Model`."""

    config: MoETransformerConfig

    def __init__(self, config: MoETransformerConfig) -> None:
        super().__init__(config)
        self.loss_weights: Mapping[str, float] = {"lm": 1.0}
        if config.aux_loss_coeff and config.moe_layers:
            # The term is a mean over layers; the papers sum over layers.
            self.loss_weights = {"lm": 1.0, "aux": config.aux_loss_coeff * config.moe_layers}

    def build(self, part: Part, ops: Ops = TORCH_OPS) -> nn.Module:
        """Return the layers of ``part`` on ``meta``, with embedding and head where it has them."""
        with torch.device("meta"):
            return MoETransformerPart(self.config, part, ops)

    def loss_counts(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Return targets for ``lm``, sequences times layers for ``aux``."""
        counts = dict(super().loss_counts(batch))
        if "aux" in self.loss_weights:
            pairs = batch.sequences * self.config.moe_layers
            counts["aux"] = torch.full((), pairs, device=batch.tokens.device)
        return counts

    def flops(self, length: int) -> Costs:
        """Return the transformer's, with router, K experts and a shared one in layers that have them."""
        c, dense = self.config, super().flops(length)
        experts = c.width * (3 * c.expert_ffn * c.top_k + c.experts)
        if c.shared_expert_ffn:
            experts += c.width * (3 * c.shared_expert_ffn + 1)
        more = 3.0 * 2 * (experts - 3 * c.width * c.ffn)
        layers = tuple(cost + c.is_moe(number) * more for number, cost in enumerate(dense.layers))
        return Costs(layers=layers, head=dense.head)


class MoETransformerPart(TransformerPart):
    """Consecutive layers, dense and with experts."""

    config: MoETransformerConfig

    def block(self, number: int, ops: Ops) -> nn.Module:
        """Return layer ``number``."""
        if not self.config.is_moe(number):
            return super().block(number, ops)
        return MoEBlock(self.config, ops, self.config.window_of(number))

    def run_layers(
        self, x_BSD: torch.Tensor, cos_sin: Rotation | None, batch: Batch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return hidden states after the layers, and the sum of their auxiliary losses."""
        losses: dict[str, torch.Tensor] = {}
        for number, layer in self.layers.items():
            out = layer(x_BSD, cos_sin, batch.cache_of(number), batch.document_starts)
            if isinstance(out, torch.Tensor):
                x_BSD = out
                continue
            x_BSD, routed = out
            count_routed(routed, cast(MoEBlock, layer).moe.router, losses)
        return x_BSD, losses

    def constant(self, name: str) -> torch.Tensor:
        """Return even load, the routers' before the first step."""
        return torch.ones(self.config.experts, dtype=torch.int64)

    def initializer(self, name: str) -> Initializer:
        """Return the transformer's; the experts' last matrices write to the residual stream, too."""
        return super().initializer("ffn.down.weight" if name.endswith("experts.down") else name)


class MoEBlock(TransformerBlock):
    """One layer: attention, then routed experts, each adding to the residual stream."""

    def add_feed_forward(self, config: TransformerConfig, ops: Ops) -> None:
        """Build router and experts."""
        self.moe = MixtureOfExperts(cast(MoETransformerConfig, config), ops)

    def forward(  # type: ignore[override]
        self,
        x_BSD: torch.Tensor,
        cos_sin: Rotation | None,
        cache: LayerCache | None = None,
        starts_BS: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, RoutingStatistics]:
        x_BSD = x_BSD + self.attn(self.attn_norm(x_BSD), cos_sin, cache, starts_BS)
        y_BSD, routed = self.moe(self.ffn_norm(x_BSD))
        return x_BSD + y_BSD, routed


class MixtureOfExperts(nn.Module):
    """Route, run the chosen experts, add the shared one."""

    def __init__(self, config: MoETransformerConfig, ops: Ops) -> None:
        super().__init__()
        self.router = tag(Router(config), Role.ROUTER)
        self.experts = Experts(config.experts, config.width, config.expert_ffn, ops)
        self.shared = SharedExpert(config, ops) if config.shared_expert_ffn else None

    def forward(self, x_BSD: torch.Tensor) -> tuple[torch.Tensor, RoutingStatistics]:
        """Return each token's weighted sum of its experts, and what the part counts."""
        routing = self.router(x_BSD)
        routed = RoutingStatistics(dict(routing.losses), routing.load)
        if self.shared is None:
            return self.experts(x_BSD, routing), routed
        shared = CallOnce(self.shared, x_BSD)
        y_BSD = self.experts(x_BSD, replace(routing, meanwhile=shared))
        return y_BSD + shared(), routed


class SharedExpert(nn.Module):
    """An expert of all tokens, whose output each token weights by a sigmoid."""

    def __init__(self, config: MoETransformerConfig, ops: Ops) -> None:
        super().__init__()
        self.ffn = SwiGLU(config.width, config.shared_expert_ffn, ops)
        self.weight_of = tag(nn.Linear(config.width, 1, bias=False), Role.REPLICATED)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """Return its weighted output."""
        y_BSD: torch.Tensor = self.weight_of(x_BSD).sigmoid() * self.ffn(x_BSD)
        return y_BSD


class Router(TopKRouter):
    """Softmax over all experts, the best K."""

    def __init__(self, config: MoETransformerConfig) -> None:
        c, balances = config, config.aux_loss_coeff > 0
        whole_batch = balances and c.load_balancing_type == "global_aux_loss"
        normalize = c.normalize_weights
        super().__init__(c.width, c.experts, c.top_k, normalize=normalize, keeps_load=whole_batch)
        self.balances = balances

    def losses(self, scores_BSE: torch.Tensor, experts_BSK: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return the auxiliary loss, if it has a weight."""
        return {"aux": load_balancing_loss(scores_BSE, experts_BSK, self.load)} if self.balances else {}
