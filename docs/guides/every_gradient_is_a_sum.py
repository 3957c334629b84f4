"""The numbers of docs/guides/every_gradient_is_a_sum.md.

python docs/guides/every_gradient_is_a_sum.py
"""

import torch
import torch.nn.functional as F
from drawing import guide, rect, svg, text

TOKENS = (12, 3, 6, 3)  # that each of four ranks has to predict
EXPERTS_GROUP = 2  # ranks that hold the same expert, of four


def data(rank):
    """Return a rank's inputs [tokens, 8] and targets [tokens]."""
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(TOKENS[rank], 8, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(5, (TOKENS[rank],), generator=generator)


def gradient(inputs, targets, divide_by):
    """Return the gradient of the loss's sum over ``divide_by`` for a weight [5, 8] that all ranks hold."""
    weight = torch.linspace(-1, 1, 40, dtype=torch.float64).view(5, 8).requires_grad_()
    (F.cross_entropy(inputs @ weight.T, targets, reduction="sum") / divide_by).backward()
    return weight.grad


def off(found, truth):
    """Return the relative difference of two tensors."""
    return ((found - truth).norm() / truth.norm()).item()


def told(difference):
    return "0%" if difference < 1e-12 else f"{difference:.0%}"


def sgd(gradients):
    """Return the change of a weight in SGD's first step, over the learning rate."""
    return gradients


def adam(gradients):
    """Return the same of Adam: bias-corrected, its two moments are the gradient and its square."""
    return gradients / (gradients.square().sqrt() + 1e-8)


def main():
    ranks = range(len(TOKENS))
    inputs, targets = (torch.cat(each) for each in zip(*map(data, ranks), strict=True))
    truth = gradient(inputs, targets, sum(TOKENS))

    means = sum(gradient(*data(rank), TOKENS[rank]) for rank in ranks) / len(TOKENS)
    sums = sum(gradient(*data(rank), sum(TOKENS)) for rank in ranks)
    print("ranks' tokens:", *TOKENS, "- in all", sum(TOKENS))
    print(f"mean of the ranks' means:   off by {told(off(means, truth))}")
    print(f"sum over the global count:  off by {told(off(sums, truth))}")

    halves = [(x[:cut], x[cut:]) for x, cut in ((inputs, 10), (targets, 10))]
    micro = sum(gradient(x, y, sum(TOKENS)) for x, y in zip(*halves, strict=True))
    print(f"two microbatches, added:    off by {told(off(micro, truth))}")

    wrong = sums / len(TOKENS) * EXPERTS_GROUP
    group = f"{EXPERTS_GROUP} of {len(TOKENS)} ranks' shares"
    print(f"an expert's, averaged over {group}: off by {told(off(wrong, truth))}")

    for name, step in (("SGD", sgd), ("Adam", adam)):
        changed = told(round(off(step(4 * truth), step(truth)), 4))
        print(f"a gradient of 4.0 times its size changes {name}'s step by {changed}")


def pictures():
    parts, y = [], 34
    parts.append(text(110, 16, "weight of each token in the gradient: mean of means"))
    parts.append(text(470, 16, "sum over the global count"))
    for rank, tokens in enumerate(TOKENS):
        parts.append(text(0, y + 17, f"rank {rank}: {tokens} tokens"))
        for left, share in ((110, 1 / tokens / len(TOKENS)), (470, 1 / sum(TOKENS))):
            for token in range(tokens):
                high = 300 * share
                parts.append(rect(left + token * 26, y + 26 - high, 22, high, f"c{rank}"))
            parts.append(text(left + tokens * 26 + 4, y + 24, f"{share:.1%} each"))
        y += 44
    return {"every_gradient_is_a_sum": svg(880, y, parts, "How much a token weighs: by rank, or alike")}


if __name__ == "__main__":
    guide(main, pictures)
