"""Lesson 2: every gradient is a sum. Look at: which sum of ranks' gradients equals that of one process.

    python docs/examples/learn/02_two_ranks_by_hand.py

Two ranks have a batch each, and one has fewer tokens to predict (the others are padding, or a prompt).
Averaging each rank's *mean* loss gives a token of the short batch more weight than one of the long: another
gradient. Divide each rank's *sum* by the number of tokens of *all* ranks, and a plain sum of the gradients
is exact. The engine does this on every axis, so no code needs to know a number of ranks to divide by.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from nanotrain_core.testing import run_ranks

TOKENS = {0: 12, 1: 3}  # that each rank has to predict


def data(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs [tokens, 8] and targets [tokens] of a rank."""
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(TOKENS[rank], 8, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(5, (TOKENS[rank],), generator=generator)


def gradient(inputs: torch.Tensor, targets: torch.Tensor, divide_by: float) -> torch.Tensor:
    """Return the gradient of loss sum / ``divide_by`` for a weight [5, 8], the same on all ranks."""
    weight = torch.linspace(-1, 1, 40, dtype=torch.float64).view(5, 8).requires_grad_()
    (F.cross_entropy(inputs @ weight.T, targets, reduction="sum") / divide_by).backward()
    return weight.grad


def on_a_rank() -> dict[str, torch.Tensor]:
    """Return the gradient, computed in both ways; it is the same on every rank."""
    inputs, targets = data(dist.get_rank())
    means = gradient(inputs, targets, divide_by=len(targets))
    dist.all_reduce(means)  # a sum over ranks ...
    means /= dist.get_world_size()  # ... made a mean, as DistributedDataParallel does
    count = torch.tensor(float(len(targets)))
    dist.all_reduce(count)  # first the tokens of all ranks
    sums = gradient(inputs, targets, divide_by=count.item())
    dist.all_reduce(sums)  # and then nothing but a sum
    return {"mean of means": means, "sum over a global count": sums}


def main() -> None:
    both = [torch.cat(each) for each in zip(data(0), data(1), strict=True)]
    one_process = gradient(*both, divide_by=len(both[1]))
    for name, found in run_ranks(on_a_rank, 2)[0].items():
        error = ((found - one_process).norm() / one_process.norm()).item()
        told = "0" if error < 1e-12 else f"{100 * error:.0f}%"
        print(f"{name:24} differs from one process by {told}")


if __name__ == "__main__":
    main()
