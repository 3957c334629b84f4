"""A model in one file with every role that the built-in transformer lacks: a latent, shared keys, experts.

Its balance loss is not linear in anything that shares of a sequence could add up.

Shapes: B batch, S sequence, D width, R latent, H heads, K head size, E experts, F feed-forward, N rows.
"""

import attrs

from nanotrain_core import hookimpl
from nanotrain_core.component import Component
from nanotrain_core.roles import Role, tag

D, R, H, K, E, CHOSEN, WIDE = 16, 8, 4, 4, 6, 2, 12


@attrs.define(frozen=True, kw_only=True)
class ToyConfig:
    """``[model] use = "toy_experts"``."""

    vocab: int = 64
    """Tokens."""


@hookimpl
def nanotrain_register_model(register):
    """Announce it."""
    factory = f"{__name__}:build"
    register(Component(name="toy_experts", config=ToyConfig, factory=factory, summary="every role once"))


def build(config):
    """Return the model; only from here on is torch imported."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    from nanotrain_core.builtin.attention import causal_attention
    from nanotrain_core.builtin.cross_entropy import linear_cross_entropy
    from nanotrain_core.contracts import Initializer, PartOutput
    from nanotrain_core.routing import Routing, run_locally

    def linear(inputs, outputs, role, *, unit=1, bias=False):
        return tag(nn.Linear(inputs, outputs, bias=bias), role, unit=unit)

    class Attention(nn.Module):
        """Keys are a part of each head's own, from a latent, and a part that all heads share."""

        def __init__(self):
            super().__init__()
            self.down = linear(D, R + K, Role.REPLICATED)
            self.norm = tag(nn.RMSNorm(R), Role.NORM)
            self.shared = tag(nn.Identity(), Role.SHARED)
            self.q = linear(D, H * 2 * K, Role.COLUMN, unit=2 * K)
            self.kv = linear(R, H * 2 * K, Role.COLUMN, unit=2 * K, bias=True)
            self.o = linear(H * K, D, Role.ROW, unit=K, bias=True)

        def forward(self, x_BSD):
            latent_BSR, shared_BSK = self.down(x_BSD).split((R, K), dim=-1)
            q = self.q(x_BSD).unflatten(-1, (-1, 2 * K))
            own_k, v = self.kv(self.norm(latent_BSR)).unflatten(-1, (-1, 2 * K)).chunk(2, dim=-1)
            shared_k = self.shared(shared_BSK).unsqueeze(2).expand_as(own_k)
            y = causal_attention(q, torch.cat((own_k, shared_k), dim=-1), v)
            return self.o(y.flatten(2))

    class Router(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(E, D))

        def forward(self, x_BSD):
            p_BSE = F.linear(x_BSD, self.weight).softmax(-1)
            weights, experts = p_BSE.topk(CHOSEN)
            load_BE = F.one_hot(experts, E).sum((1, 2)).to(p_BSE.dtype)
            loss = (load_BE / x_BSD.shape[1] * p_BSE.mean(1)).sum(1).square().sum()
            return Routing(experts, weights / weights.sum(-1, keepdim=True), {"balance": loss})

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Parameter(torch.empty(E, WIDE, D))
            self.down = nn.Parameter(torch.empty(E, D, WIDE))

        def forward(self, x_BSD, routing):
            return run_locally(self.compute, x_BSD, routing, E)

        def compute(self, rows_ND, counts_E):
            pieces = torch.split(rows_ND, counts_E.tolist())
            outputs = [
                F.linear(F.silu(F.linear(x, self.up[e])), self.down[e])
                for e, x in enumerate(pieces)
                if len(x)
            ]
            return torch.cat(outputs)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = Attention()
            self.norm = tag(nn.RMSNorm(D), Role.NORM)
            self.router = tag(Router(), Role.ROUTER)
            self.experts = tag(Experts(), Role.EXPERTS, split={"up": 1, "down": 2})
            self.shared_up = linear(D, WIDE, Role.COLUMN)
            self.shared_down = linear(WIDE, D, Role.ROW)

        def forward(self, x_BSD, losses):
            x_BSD = x_BSD + self.attn(x_BSD)
            y_BSD = self.norm(x_BSD)
            routing = self.router(y_BSD)
            losses.append(routing.losses["balance"])
            return x_BSD + self.experts(y_BSD, routing) + self.shared_down(F.silu(self.shared_up(y_BSD)))

    class Head(nn.Module):
        def __init__(self, vocab):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(vocab, D))

        def forward(self, x_BSD, targets_BS, table_VD):
            if targets_BS is None:
                return F.linear(x_BSD, self.weight)
            return linear_cross_entropy(x_BSD.flatten(0, 1), self.weight, targets_BS.flatten())

    class ToyPart(nn.Module):
        def __init__(self, config, part):
            super().__init__()
            assert part.has_embedding
            assert part.has_head
            self.embed = tag(nn.Embedding(config.vocab, D), Role.VOCAB)
            self.layers = nn.ModuleDict(
                {str(i): tag(Layer(), Role.BLOCK) for i in range(part.first, part.last)}
            )
            self.head = tag(Head(config.vocab), Role.HEAD)

        def forward(self, inputs, batch):
            x_BSD, balance = self.embed(inputs), []
            for layer in self.layers.values():
                x_BSD = layer(x_BSD, balance)
            output = self.head(x_BSD, batch.targets, None)
            if batch.targets is None:
                return PartOutput(output)
            return PartOutput(None, {"lm": output, "balance": torch.stack(balance).sum()})

        def initializer(self, name):
            return Initializer("constant", 1.0) if "norm" in name else Initializer("normal", 0.15)

    class Toy:
        layers, max_length = 2, None

        def __init__(self, config):
            self.config, self.vocab_size = config, config.vocab
            self.loss_weights = {"lm": 1.0, "balance": 0.5}

        def build(self, part):
            with torch.device("meta"):
                return ToyPart(self.config, part)

        def loss_counts(self, batch):
            sequences = torch.tensor(batch.sequences, device=batch.tokens.device)
            return {"lm": batch.target_tokens(), "balance": sequences}

        def flops_per_token(self, length):
            return 1.0

    return Toy(config)
