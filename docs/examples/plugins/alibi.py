"""A decoder whose attention knows distances by ALiBi alone. Source: Press et al., arXiv 2108.12409.

The slopes are a buffer with an entry for each head, in a module of role PER_HEAD: with tensor parallelism a
rank has those of its own heads.
"""

import attrs

from nanotrain_core.api import Component, Divisible, ModelConfig, Range, Role, hookimpl


@attrs.define(frozen=True, kw_only=True)
class AlibiConfig(ModelConfig):
    """`[model] use = "alibi"`."""

    layers: int = attrs.field(default=4, validator=Range(1))
    """Of attention and feed-forward."""
    heads: int = attrs.field(default=4, validator=Range(1))
    """Of attention."""
    head_size: int = attrs.field(default=32, validator=Range(1))
    """Of each; the width of the model is that of all heads."""
    vocab: int = attrs.field(default=256, validator=Range(2))
    """Tokens."""

    def divisibility(self):
        yield Divisible((Role.COLUMN, Role.ROW), "model.heads", self.heads, "heads")
        yield Divisible((Role.VOCAB, Role.HEAD), "model.vocab", self.vocab, "rows of the vocabulary")


@hookimpl
def nanotrain_register_model(register):
    factory = f"{__name__}:build"
    register(Component(name="alibi", config=AlibiConfig, factory=factory, summary="decoder with ALiBi"))


def build(config):
    import torch
    import torch.nn.functional as F
    from torch import nn

    from nanotrain_core.api import Costs, tag
    from nanotrain_core.api.torch import TORCH_OPS, Head, Initializer, ModelPart, PartOutput, RMSNorm

    size, width = config.head_size, config.heads * config.head_size

    class Slopes(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("slopes", torch.empty(config.heads), persistent=False)

        def forward(self, length, dtype):
            """Return what is added to scores, [H, S, S]: minus slope times distance, no future."""
            place = torch.arange(length, device=self.slopes.device)
            behind = (place[:, None] - place).to(self.slopes.dtype)
            bias = -self.slopes[:, None, None] * behind
            return bias.masked_fill(behind < 0, -torch.inf).to(dtype)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm_1 = tag(RMSNorm(width, eps=1e-5), Role.NORM)
            for name in ("q", "k", "v"):
                setattr(self, name, tag(nn.Linear(width, width, bias=False), Role.COLUMN, unit=size))
            self.alibi = tag(Slopes(), Role.PER_HEAD)
            self.out = tag(nn.Linear(width, width, bias=False), Role.ROW, unit=size)
            self.norm_2 = tag(RMSNorm(width, eps=1e-5), Role.NORM)
            self.up = tag(nn.Linear(width, 4 * width, bias=False), Role.COLUMN, unit=4 * size)
            self.down = tag(nn.Linear(4 * width, width, bias=False), Role.ROW, unit=4 * size)

        def forward(self, x_BSD):
            h_BSD = self.norm_1(x_BSD)
            q, k, v = (f(h_BSD).unflatten(-1, (-1, size)).transpose(1, 2) for f in (self.q, self.k, self.v))
            y_BHSK = F.scaled_dot_product_attention(q, k, v, attn_mask=self.alibi(q.shape[2], q.dtype))
            x_BSD = x_BSD + self.out(y_BHSK.transpose(1, 2).flatten(2))
            return x_BSD + self.down(F.gelu(self.up(self.norm_2(x_BSD))))

    class Part(ModelPart):
        def __init__(self, part):
            super().__init__()
            if part.has_embedding:
                self.embed = tag(nn.Embedding(config.vocab, width), Role.VOCAB)
            numbers = range(part.first, part.last)
            self.layers = nn.ModuleDict({str(n): tag(Layer(), Role.BLOCK) for n in numbers})
            if part.has_head:
                self.norm = tag(RMSNorm(width, eps=1e-5), Role.NORM)
                self.head = tag(Head(config.vocab, width, tied=False), Role.HEAD)

        def forward(self, inputs, batch):
            x_BSD = self.embed(inputs) if hasattr(self, "embed") else inputs
            for layer in self.layers.values():
                x_BSD = layer(x_BSD)
            if not hasattr(self, "head"):
                return PartOutput(x_BSD)
            out = self.head(self.norm(x_BSD), batch.targets, None)
            return PartOutput(out) if batch.targets is None else PartOutput(None, {"lm": out})

        def initializer(self, name):
            return Initializer("constant", 1.0) if "norm" in name else Initializer("normal", 0.05)

        def constant(self, name):
            """Return the whole model's buffer of that name: 2^(-8/n), 2^(-16/n), ... for n heads."""
            return torch.tensor([2 ** (-8 * (head + 1) / config.heads) for head in range(config.heads)])

    class Alibi:
        layers, vocab_size, max_length = config.layers, config.vocab, None
        loss_weights = {"lm": 1.0}  # noqa: RUF012

        def build(self, part, ops=TORCH_OPS):
            with torch.device("meta"):
                return Part(part)

        def loss_counts(self, batch):
            return {"lm": batch.target_tokens()}

        def flops(self, length):
            layer = 6.0 * (12 * width**2 + width * length)
            return Costs(layers=(layer,) * config.layers, head=6.0 * config.vocab * width)

    return Alibi()
