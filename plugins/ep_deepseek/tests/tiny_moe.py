"""A mixture of experts with all that its contract has: balance loss, router bias, shared expert."""

import attrs

from nanotrain_core import hookimpl
from nanotrain_core.component import Component


@attrs.define(frozen=True, kw_only=True)
class TinyMoEConfig:
    """`[model] use = "tiny_moe"`."""

    layers: int = 2
    """Layers."""
    width: int = 32
    """Of the hidden states."""
    heads: int = 4
    """Of the attention."""
    vocab: int = 64
    """Tokens."""
    experts: int = 8
    """Per layer."""
    chosen: int = 2
    """Experts per token."""
    ffn: int = 12
    """Width of an expert."""
    favoured: int = 0
    """If not 0, all tokens choose among the first so many experts."""


@hookimpl
def nanotrain_register_model(register):
    factory = f"{__name__}:build"
    register(Component(name="tiny_moe", config=TinyMoEConfig, factory=factory, summary="for tests"))


def build(config):
    import torch
    import torch.nn.functional as F
    from torch import nn

    from nanotrain_core.builtin.configs import TransformerConfig
    from nanotrain_core.builtin.head import Head
    from nanotrain_core.builtin.rms_norm import RMSNorm
    from nanotrain_core.builtin.transformer import Attention, SwiGLU
    from nanotrain_core.contracts import Initializer, PartOutput
    from nanotrain_core.dtypes import keep_dtype
    from nanotrain_core.roles import Role, tag
    from nanotrain_core.routing import Routing, run_locally

    E, K, D, V = config.experts, config.chosen, config.width, config.vocab
    dense = TransformerConfig(
        layers=config.layers, width=D, heads=config.heads, kv_heads=config.heads, head_size=D // config.heads,
        ffn=config.ffn, vocab=V,
    )  # fmt: skip

    class Router(nn.Module):
        """Sigmoid scores with a bias for the choice, and the balance loss of each sequence."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(E, D))
            self.bias = nn.Parameter(torch.empty(E), requires_grad=False)
            keep_dtype(self, "bias")
            self.load = None

        def forward(self, x_BSD):
            scores_BSE = torch.sigmoid(F.linear(x_BSD, self.weight))
            wanted_BSE = scores_BSE + self.bias
            if config.favoured:
                wanted_BSE = wanted_BSE - 100 * (torch.arange(E) >= config.favoured)
            experts_BSK = wanted_BSE.topk(K, dim=-1).indices
            weights_BSK = scores_BSE.gather(-1, experts_BSK)
            weights_BSK = weights_BSK / weights_BSK.sum(-1, keepdim=True)
            if self.training:
                load = torch.bincount(experts_BSK.flatten(), minlength=E)
                self.load = load if self.load is None else self.load + load
            share_BE = F.one_hot(experts_BSK, E).sum((1, 2)).to(scores_BSE) * E / K / x_BSD.shape[1]
            mean_BE = (scores_BSE / scores_BSE.sum(-1, keepdim=True)).mean(1)
            return Routing(experts_BSK, weights_BSK, {"balance": (share_BE * mean_BE).sum()})

        def take_load(self):
            load, self.load = self.load, None
            return torch.zeros(E, dtype=torch.int64) if load is None else load

        @torch.no_grad()
        def balance(self, load):
            self.bias += 0.001 * torch.sign(load.double().mean() - load)

    class Experts(nn.Module):
        """SwiGLU experts; without a single row, a result that knows nothing of its input."""

        def __init__(self):
            super().__init__()
            self.gate = nn.Parameter(torch.empty(E, config.ffn, D))
            self.up = nn.Parameter(torch.empty(E, config.ffn, D))
            self.down = nn.Parameter(torch.empty(E, D, config.ffn))

        def forward(self, x_BSD, routing):
            return run_locally(self.compute, x_BSD, routing, len(self.gate))

        def compute(self, rows_ND, counts_E):
            pieces = rows_ND.split(counts_E.tolist())
            done = [self.one(e, piece) for e, piece in enumerate(pieces) if len(piece)]
            return torch.cat(done) if done else rows_ND.new_zeros(0, D)

        def one(self, expert, rows_ND):
            hidden = F.silu(rows_ND @ self.gate[expert].T) * (rows_ND @ self.up[expert].T)
            return hidden @ self.down[expert].T

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn_norm = tag(RMSNorm(D, eps=1e-5), Role.NORM)
            self.attn = Attention(dense)
            self.ffn_norm = tag(RMSNorm(D, eps=1e-5), Role.NORM)
            self.router = tag(Router(), Role.ROUTER)
            self.experts = tag(Experts(), Role.EXPERTS, split={"gate": 1, "up": 1, "down": 2})
            self.shared = SwiGLU(dense)

        def forward(self, x_BSD):
            x_BSD = x_BSD + self.attn(self.attn_norm(x_BSD), None)
            h_BSD = self.ffn_norm(x_BSD)
            routing = self.router(h_BSD)
            return x_BSD + self.experts(h_BSD, routing) + self.shared(h_BSD), routing.losses["balance"]

    class Part(nn.Module):
        def __init__(self, part):
            super().__init__()
            self.part = part
            if part.has_embedding:
                self.embed = tag(nn.Embedding(V, D), Role.VOCAB)
            self.layers = nn.ModuleDict(
                {str(i): tag(Layer(), Role.BLOCK) for i in range(part.first, part.last)}
            )
            if part.has_head:
                self.norm = tag(RMSNorm(D, eps=1e-5), Role.NORM)
                self.head = tag(Head(V, D, tied=False), Role.HEAD)

        def forward(self, inputs, batch):
            x_BSD = self.embed(inputs) if self.part.has_embedding else inputs
            losses = {}
            for layer in self.layers.values():
                x_BSD, balance = layer(x_BSD)
                losses["balance"] = losses.get("balance", 0.0) + balance
            if not self.part.has_head:
                return PartOutput(x_BSD, losses)
            out = self.head(self.norm(x_BSD), batch.targets, None)
            return PartOutput(out) if batch.targets is None else PartOutput(None, {"lm": out, **losses})

        def initializer(self, name):
            if name.endswith("bias"):
                return Initializer("constant", 0.0)
            return (
                Initializer("constant", 1.0) if name.endswith("norm.weight") else Initializer("normal", 0.2)
            )

    class TinyMoE:
        def __init__(self):
            self.layers, self.vocab_size, self.max_length = config.layers, V, None
            self.loss_weights = {"lm": 1.0, "balance": 0.1}

        def build(self, part):
            with torch.device("meta"):
                return Part(part)

        def loss_counts(self, batch):
            return {"lm": batch.target_tokens(), "balance": torch.tensor(len(batch.tokens) * config.layers)}

        def flops_per_token(self, length):
            return 1.0

    return TinyMoE()
