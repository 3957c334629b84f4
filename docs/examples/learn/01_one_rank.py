"""Lesson 1: one process trains. Look at: the loss begins at ln 64 and falls towards the entropy, ln 2.

    python docs/examples/learn/01_one_rank.py

The model is yours, the optimizer is torch's, and the engine does what a loop does: forward, backward, clip,
step. A loss is a *sum* over tokens, divided by the number of tokens of the whole step; lesson 2 explains it.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from nanotrain_core import RuntimeEngine
from nanotrain_core.api.torch import Monitor
from nanotrain_core.script import ScriptConfig

V, D, S, B = 64, 32, 16, 8  # vocabulary, width, tokens of a sequence, sequences of a batch


class TwoLayers(nn.Module):
    """Predicts the next token from this one: enough for data in which each token has two successors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V, bias=False)
        nn.init.normal_(self.embed.weight, std=0.1)
        nn.init.normal_(self.head.weight, std=0.1)

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        return self.head(F.gelu(self.embed(tokens_BS)))  # logits [B, S, V]


def batches(generator: torch.Generator) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Draw random walks over a graph, in which each token has two successors with equal probability."""
    successors_V2 = torch.randint(V, (V, 2), generator=generator)
    walks_NS = [torch.randint(V, (200, B, 1), generator=generator)]
    for _ in range(S):
        choice = torch.randint(2, (200, B, 1), generator=generator)
        walks_NS.append(successors_V2[walks_NS[-1]].gather(-1, choice[..., None])[..., 0])
    walks = torch.cat(walks_NS, dim=-1)
    return [(walk[:, :-1], walk[:, 1:]) for walk in walks]


class Losses(Monitor):
    """Records the loss of every step: engines call the methods of monitors."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_step(self, report) -> None:
        self.values.append(report.loss)


def main() -> None:
    torch.manual_seed(1234)
    loader, losses, model = batches(torch.Generator().manual_seed(1234)), Losses(), TwoLayers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2, weight_decay=0.0)
    engine = RuntimeEngine(model, optimizer, ScriptConfig(clip_norm=1.0), callbacks=[losses])
    engine.fit(loader, steps=200)
    print(f"no idea: ln 64 = {math.log(V):.2f}; as well as can be: ln 2 = {math.log(2):.2f}")
    for step in (1, 20, 200):
        print(f"step {step:3}: loss {losses.values[step - 1]:.1f}")


if __name__ == "__main__":
    main()
