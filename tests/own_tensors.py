"""A plugin whose data has tensors of its own, and a model whose loss reads them."""

import attrs

from nanotrain_core.api import Component, ModelConfig, Support, hookimpl


@attrs.define(frozen=True, kw_only=True)
class ScoredConfig:
    """`[data] use = "scored"`."""

    lost: bool = False
    """Give each shard the scores of the first rows of the split: a fault."""


@attrs.define(frozen=True, kw_only=True)
class WeightedConfig(ModelConfig):
    """`[model] use = "weighted"`."""

    layers: int = 2
    """Residual layers."""
    width: int = 16
    """Of the hidden states."""
    vocab: int = 32
    """Tokens."""
    reward: bool = False
    """Compute no next-token loss, but the squared error of a score."""


@hookimpl
def nanotrain_register_data(register):
    register(
        Component(
            name="scored",
            config=ScoredConfig,
            factory=f"{__name__}:scored",
            summary="scores of sequences and weights of tokens",
            provides={"scores"},
        )
    )


@hookimpl
def nanotrain_register_model(register):
    register(
        Component(
            name="weighted",
            config=WeightedConfig,
            factory=f"{__name__}:weighted",
            summary="a loss that is weighted by the data",
            requires={"scores"},
            supports={"sequence_parallel": Support.UNSUPPORTED},  # its head computes whole sequences
        )
    )


def scored(config):
    import numpy as np
    import torch

    from nanotrain_core.api.torch import Batch, SequenceData

    class Scored(SequenceData):
        vocab_size, bytes_per_token = 32, None

        def open(self, *, length, seed):
            self.prepare(length=length, seed=seed, train=48, validation=12, fingerprint="scored")

        def read_batch(self, numbers, *, validation):
            numbers = np.asarray(numbers, np.int64) + (48 if validation else 0)
            text = torch.from_numpy((numbers[:, None] * 7 + np.arange(self.length + 1) * 3) % 31)
            scored = torch.arange(len(numbers)) if config.lost else torch.from_numpy(numbers)
            weights = ((text[:, 1:] % 5) + 1) / 4
            return Batch(
                text[:, :-1],
                text[:, 1:].contiguous(),
                per_sequence={"score": (scored % 11 - 5).double()},
                per_token={"weight": weights.double()},
            )

        def describe(self):
            return "60 scored sequences"

        def encode(self, text):
            return [ord(letter) % 32 for letter in text]

        def decode(self, tokens):
            return "".join(chr(64 + token) for token in tokens)

    return Scored()


def weighted(config):
    import torch
    import torch.nn.functional as F
    from torch import nn

    from nanotrain_core.api import Costs, Role, tag
    from nanotrain_core.api.torch import IGNORE, TORCH_OPS, Initializer, ModelPart, PartOutput

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = tag(nn.Linear(config.width, 2 * config.width, bias=False), Role.COLUMN)
            self.down = tag(nn.Linear(2 * config.width, config.width, bias=False), Role.ROW)

        def forward(self, x):
            return x + self.down(F.gelu(self.up(x)))

    class WeightedPart(ModelPart):
        def __init__(self, part):
            super().__init__()
            if part.has_embedding:
                self.embed = tag(nn.Embedding(config.vocab, config.width), Role.VOCAB)
            layers = {str(number): tag(Layer(), Role.BLOCK) for number in range(part.first, part.last)}
            self.layers = nn.ModuleDict(layers)
            if part.has_head:
                self.out = tag(nn.Linear(config.width, config.vocab, bias=False), Role.REPLICATED)

        def forward(self, inputs, batch):
            x = self.embed(inputs) if hasattr(self, "embed") else inputs
            for layer in self.layers.values():
                x = layer(x)
            if not hasattr(self, "out"):
                return PartOutput(x)
            logits = self.out(x)
            if batch.targets is None:
                return PartOutput(logits)
            score_B, weight_BS = batch.per_sequence.get("score"), batch.per_token.get("weight")
            if config.reward:
                counted_B = (batch.targets != IGNORE).any(1)
                missed_B = logits[:, -1, 0] - (0.0 if score_B is None else score_B)
                return PartOutput(None, {"reward": (missed_B.square() * counted_B).sum()})
            nll_BS = F.cross_entropy(logits.mT, batch.targets, ignore_index=IGNORE, reduction="none")
            if score_B is None:  # of no data: `nanotrain plan`
                score_B, weight_BS = nll_BS.new_ones(len(nll_BS)), torch.ones_like(nll_BS)
            each = (nll_BS * weight_BS).sum(1) * score_B
            return PartOutput(None, {"lm": nll_BS.sum(), "weighted": each.sum()})

        def initializer(self, name):
            return Initializer("normal", 0.1)

    class Weighted:
        layers, vocab_size, max_length = config.layers, config.vocab, None

        def __init__(self):
            self.loss_weights = {"reward": 0.5} if config.reward else {"lm": 0.0, "weighted": 1.0}

        def build(self, part, ops=TORCH_OPS):
            with torch.device("meta"):
                return WeightedPart(part)

        def loss_counts(self, batch):
            if config.reward:
                return {"reward": (batch.targets != IGNORE).any(1).sum()}
            weights = batch.per_token.get("weight")
            counted = batch.target_tokens() if weights is None else weights.sum()
            return {"lm": batch.target_tokens(), "weighted": counted}

        def flops(self, length):
            layer = 6.0 * 4 * config.width**2
            return Costs(layers=(layer,) * config.layers, head=6.0 * config.vocab * config.width)

    return Weighted()
