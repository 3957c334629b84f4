"""A model and a loader as a script has them, and the loop that it would train them with."""

import torch
from torch import nn
from torch.nn import functional as F

from nanotrain_core.batch import IGNORE
from nanotrain_core.contracts import Monitor


class Recorder(Monitor):
    """Keeps every report."""

    def __init__(self):
        self.steps, self.evaluations = [], []

    def on_step(self, report):
        self.steps.append(report)

    def on_evaluation(self, report):
        self.evaluations.append(report)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11)).double()


def make_loader(batches=4, rows=3):
    generator = torch.Generator().manual_seed(1)
    loader = []
    for _ in range(batches):
        tokens = torch.randint(11, (rows, 6), generator=generator)
        targets = (tokens * 3 + 1) % 11
        targets[0, : len(loader)] = IGNORE  # batches with different numbers of targets
        loader.append((tokens, targets))
    return loader


def plain_loop(model, optimizer, loader, steps, accumulate, clip_norm):
    """Accumulate over unequal microbatches the exact way: one mean over all their targets."""
    losses, norms, position = [], [], 0
    for _ in range(steps):
        taken = [loader[(position + i) % len(loader)] for i in range(accumulate)]
        position += accumulate
        count = sum(int((targets != IGNORE).sum()) for _, targets in taken)
        total = 0.0
        for tokens, targets in taken:
            logits = model(tokens).flatten(0, 1)
            loss = F.cross_entropy(logits, targets.flatten(), reduction="sum") / count
            loss.backward()
            total += loss.item()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip_norm).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, norms
