"""DeepSeek-V3 and V2: dimensions, loss terms and FLOPs.

Sources: DeepSeek-V3, arXiv 2412.19437; DeepSeek-V2, arXiv 2405.04434.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from nanotrain_core.api import Costs, Part
from nanotrain_core.api.torch import TORCH_OPS, Batch, Ops, counting_routers
from nanotrain_deepseek.config import DeepSeekConfig
from nanotrain_deepseek.mla import LatentAttention
from nanotrain_deepseek.part import DeepSeekPart
from nanotrain_deepseek.router import Router
from nanotrain_deepseek.yarn import softmax_scale

#: Balance losses, named as the config key of their weight.
BALANCE = ("seq_balance", "expert_balance", "device_balance", "comm_balance")


class DeepSeek:
    """Dimensions and parts of the model. See :class:`~nanotrain_core.contracts.Model`."""

    def __init__(self, config: DeepSeekConfig) -> None:
        self.config = config
        self.layers = config.layers
        self.vocab_size = config.vocab
        self.max_length = config.max_length or None
        self.caches = True
        self.loss_weights: Mapping[str, float] = self._loss_weights(config)

    def _loss_weights(self, c: DeepSeekConfig) -> dict[str, float]:
        """Return the weight of each term's mean.

        A balance loss is reported as the mean over layers. The papers sum over layers, each with the weight
        of the recipe, so here the mean has that weight times the number of layers.
        """
        weights = {"lm": 1.0}
        if c.mtp:
            weights["mtp"] = c.mtp_weight
        return weights | {name: getattr(c, name) * c.moe_layers for name in BALANCE if getattr(c, name)}

    def build(self, part: Part, ops: Ops = TORCH_OPS) -> nn.Module:
        """Return the layers of ``part`` on ``meta``, with embedding and head where it has them."""
        with torch.device("meta"):
            return DeepSeekPart(self.config, part, ops)

    def change(self, config: DeepSeekConfig, parts: Iterable[nn.Module]) -> None:
        """Apply ``config``: the MTP loss's weight, the routers' bias update rate, RoPE's base and YaRN."""
        self.config, self.loss_weights = config, self._loss_weights(config)
        parts = tuple(parts)
        for module in (module for part in parts for module in part.modules()):
            if isinstance(module, DeepSeekPart):
                module.config = config
            elif isinstance(module, LatentAttention):
                module.scale = softmax_scale(config)
        for router in counting_routers(parts).values():
            if isinstance(router, Router):
                router.bias_update_rate = config.bias_update_rate

    def loss_counts(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Return targets for ``lm``; those of every depth for ``mtp``; sequences times layers for balance."""
        counts = {"lm": batch.target_tokens()}
        if self.config.mtp:
            counts["mtp"] = self._further_targets(batch)
        pairs = torch.full((), batch.sequences * self.config.moe_layers, device=batch.tokens.device)
        return counts | {name: pairs for name in BALANCE if name in self.loss_weights}

    def _further_targets(self, batch: Batch) -> torch.Tensor:
        depths = range(1, self.config.mtp + 1)
        return torch.stack([batch.shifted(depth).target_tokens() for depth in depths]).sum()

    def flops(self, length: int) -> Costs:
        """Return 3 times the forward pass: 2 FLOPs per weight that a token uses, and causal attention.

        The head is a matrix product, the embedding a look-up that costs nothing. Each module for a further
        token is an MoE layer, a projection and a head. A token attends to ``length`` / 2 others on average:
        2 FLOPs for each number of their keys and of their values.
        """
        c = self.config
        dense = min(c.dense_layers, c.layers)
        experts = 3 * c.width * c.expert_ffn * (c.top_k + c.shared_experts) + c.width * c.experts
        scores_and_values = length * c.heads * (c.qk_size + c.value_size)
        dense_layer, moe_layer = (
            3.0 * (2 * (self._attention_weights() + ffn) + scores_and_values)
            for ffn in (3 * c.width * c.ffn, experts)
        )
        projection, vocabulary = 6.0 * 2 * c.width**2, 6.0 * c.vocab * c.width
        return Costs(
            layers=(dense_layer,) * dense + (moe_layer,) * (c.layers - dense),
            head=vocabulary + c.mtp * (projection + moe_layer + vocabulary),
        )

    def _attention_weights(self) -> int:
        c = self.config
        q_out = c.heads * c.qk_size
        queries = c.q_rank * (c.width + q_out) if c.q_rank else c.width * q_out
        latent = c.width * (c.kv_rank + c.rope_size)
        keys_and_values = c.kv_rank * c.heads * (c.nope_size + c.value_size)
        return queries + latent + keys_and_values + c.heads * c.value_size * c.width
