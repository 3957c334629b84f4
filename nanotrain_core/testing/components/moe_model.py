"""The implementation of ``routed``: latent attention with shared keys, a router with bias and loss, experts.

Its balance loss is not linear in anything that shares of a sequence could add up.

Shapes: B batch, S sequence, D width, R latent, H heads, K head size, E experts, N rows, F feed-forward.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from nanotrain_core.batch import Batch
from nanotrain_core.contracts import Initializer, ModelPart, PartOutput
from nanotrain_core.layout.roles import Role, tag
from nanotrain_core.models.head import Head
from nanotrain_core.models.norms import RMSNorm
from nanotrain_core.models.ops import TORCH_OPS, Ops
from nanotrain_core.moe.routing import CountingRouter, Routing, run_locally
from nanotrain_core.pipeline.actions import Costs, Part
from nanotrain_core.precision.dtypes import keep_dtype


def linear(inputs: int, outputs: int, role: Role, *, unit: int = 1, bias: bool = False) -> nn.Linear:
    """Return a tagged linear layer."""
    return tag(nn.Linear(inputs, outputs, bias=bias), role, unit=unit)


def norm(width: int, ops: Ops) -> nn.Module:
    """Return a tagged normalization."""
    return tag(RMSNorm(width, eps=1e-5, ops=ops), Role.NORM)


class Attention(nn.Module):
    """Attention whose keys consist of a part per head, from a latent, and a part shared by all heads."""

    def __init__(self, config: Any, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        D, H = config.width, config.heads
        self.head_size, self.latent = K, R = D // H, D // 2
        self.down = linear(D, R + K, Role.REPLICATED)
        self.norm = norm(R, ops)
        self.shared = tag(nn.Identity(), Role.SHARED)
        self.q = linear(D, H * 2 * K, Role.COLUMN, unit=2 * K)
        self.kv = linear(R, H * 2 * K, Role.COLUMN, unit=2 * K, bias=True)
        self.o = linear(H * K, D, Role.ROW, unit=K, bias=True)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        heads = (-1, 2 * self.head_size)
        latent_BSR, shared_BSK = self.down(x_BSD).split((self.latent, self.head_size), dim=-1)
        q = self.q(x_BSD).unflatten(-1, heads)
        own_k, v = self.kv(self.norm(latent_BSR)).unflatten(-1, heads).chunk(2, dim=-1)
        shared_k = self.shared(shared_BSK).unsqueeze(2).expand_as(own_k)
        y = self.ops.attention(q, torch.cat((own_k, shared_k), dim=-1), v)
        out_BSD: torch.Tensor = self.o(y.flatten(2))
        return out_BSD


class Router(CountingRouter):
    """A router: sigmoid scores with a bias for the choice, and the balance loss of each sequence."""

    def __init__(self, config: Any) -> None:
        super().__init__(config.experts)
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.experts, config.width))
        self.bias = nn.Parameter(torch.empty(config.experts), requires_grad=False)
        keep_dtype(self, "bias")

    def forward(self, x_BSD: torch.Tensor) -> Routing:
        E, K, favored = self.config.experts, self.config.chosen, self.config.favored
        scores_BSE = torch.sigmoid(F.linear(x_BSD, self.weight))
        wanted_BSE = scores_BSE + self.bias
        if favored:
            wanted_BSE = wanted_BSE - 100 * (torch.arange(E) >= favored)
        experts_BSK = wanted_BSE.topk(K, dim=-1).indices
        weights_BSK = scores_BSE.gather(-1, experts_BSK)
        weights_BSK = weights_BSK / weights_BSK.sum(-1, keepdim=True)
        load = torch.bincount(experts_BSK.flatten(), minlength=E)
        share_BE = F.one_hot(experts_BSK, E).sum((1, 2)).to(scores_BSE) * E / K / x_BSD.shape[1]
        mean_BE = (scores_BSE / scores_BSE.sum(-1, keepdim=True)).mean(1)
        return Routing(experts_BSK, weights_BSK, {"balance": (share_BE * mean_BE).sum()}, load)

    @torch.no_grad()
    def balance(self, load: torch.Tensor) -> None:
        """Move the bias towards experts with few tokens."""
        self.bias.add_(0.001 * torch.sign(load.double().mean() - load))


class Experts(nn.Module):
    """SwiGLU experts; without any row, a result that is detached from its input."""

    def __init__(self, config: Any, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        E, D, width = config.experts, config.width, config.ffn
        self.gate = nn.Parameter(torch.empty(E, width, D))
        self.up = nn.Parameter(torch.empty(E, width, D))
        self.down = nn.Parameter(torch.empty(E, D, width))

    def forward(self, x_BSD: torch.Tensor, routing: Routing) -> torch.Tensor:
        return run_locally(self.compute, x_BSD, routing, len(self.gate), self.ops)

    def compute(self, rows_ND: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        """Return the outputs of rows sorted by expert."""
        if not len(rows_ND):
            return rows_ND.new_zeros(0, rows_ND.shape[-1])
        return self.ops.experts(rows_ND, counts_E, self.gate, self.up, self.down)


class Layer(nn.Module):
    """Attention; then chosen experts, and one that all tokens share."""

    def __init__(self, config: Any, ops: Ops) -> None:
        super().__init__()
        D = config.width
        self.attn_norm, self.attn = norm(D, ops), Attention(config, ops)
        self.ffn_norm = norm(D, ops)
        self.router = tag(Router(config), Role.ROUTER)
        self.experts = tag(Experts(config, ops), Role.EXPERTS, split={"gate": 1, "up": 1, "down": 2})
        self.shared_up = linear(D, config.ffn, Role.COLUMN)
        self.shared_down = linear(config.ffn, D, Role.ROW)

    def forward(self, x_BSD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        x_BSD = x_BSD + self.attn(self.attn_norm(x_BSD))
        h_BSD = self.ffn_norm(x_BSD)
        routing = self.router(h_BSD)
        shared_BSD = self.shared_down(F.silu(self.shared_up(h_BSD)))
        out_BSD = x_BSD + self.experts(h_BSD, routing) + shared_BSD
        return out_BSD, routing.losses["balance"], routing.load


class RoutedPart(ModelPart):
    """See :class:`~nanotrain_core.contracts.ModelPart`."""

    def __init__(self, config: Any, part: Part, ops: Ops) -> None:
        super().__init__()
        self.part = part
        if part.has_embedding:
            self.embed = tag(nn.Embedding(config.vocab, config.width), Role.VOCAB)
        numbers = range(part.first, part.last)
        self.layers = nn.ModuleDict({str(n): tag(Layer(config, ops), Role.BLOCK) for n in numbers})
        if part.has_head:
            self.norm = norm(config.width, ops)
            self.head = tag(Head(config.vocab, config.width, tied=False, ops=ops), Role.HEAD)

    def forward(self, inputs: torch.Tensor, batch: Batch) -> PartOutput:
        """Run tokens [B, S], or hidden states [B, S, D] of the previous part, through the layers."""
        x_BSD = self.embed(inputs) if self.part.has_embedding else inputs
        balance: list[torch.Tensor] = []
        for layer in self.layers.values():
            x_BSD, loss, load = layer(x_BSD)
            balance.append(loss)
            if load is not None:
                cast(Layer, layer).router.add_load(load)
        losses = {"balance": torch.stack(balance).sum()} if balance else {}
        if not self.part.has_head:
            return PartOutput(x_BSD, losses)
        out = self.head(self.norm(x_BSD), batch.targets, None)
        return PartOutput(out) if batch.targets is None else PartOutput(None, {"lm": out, **losses})

    def initializer(self, name: str) -> Initializer:
        """Return ones for norms, zeros for the routers' bias, and a normal."""
        if name.endswith("router.bias"):
            return Initializer("constant", 0.0)
        return Initializer("constant", 1.0) if "norm" in name else Initializer("normal", 0.2)


class Routed:
    """See :class:`~nanotrain_core.contracts.Model`."""

    def __init__(self, config: Any) -> None:
        self.config, self.layers, self.vocab_size = config, config.layers, config.vocab
        self.max_length: int | None = None
        self.loss_weights = {"lm": 1.0, "balance": 0.1}

    def build(self, part: Part, ops: Ops = TORCH_OPS) -> nn.Module:
        """Return a part on ``meta``."""
        with torch.device("meta"):
            return RoutedPart(self.config, part, ops)

    def loss_counts(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Return target tokens, and sequences times layers."""
        pairs = torch.tensor(batch.sequences * self.layers, device=batch.tokens.device)
        return {"lm": batch.target_tokens(), "balance": pairs}

    def flops(self, length: int) -> Costs:
        """Return 3 times the forward pass: 2 FLOPs per weight that a token uses, and causal attention."""
        c = self.config
        D, H = c.width, c.heads
        K, R = D // H, D // 2
        attention = D * (R + K) + D * H * 2 * K + R * H * 2 * K + H * K * D
        ffn = c.experts * D + 3 * D * c.ffn * c.chosen + 2 * D * c.ffn
        layer = 3.0 * (2 * (attention + ffn) + length * H * (2 * K + K))
        return Costs(layers=(layer,) * c.layers, head=6.0 * c.vocab * D)
