"""The numbers of docs/guides/tensor_parallelism.md.

python docs/guides/tensor_parallelism.py
"""

import torch
import torch.nn.functional as F
from drawing import guide, rect, svg, text

D, HIDDEN, TOKENS = 8, 12, 6
RANKS = 2


def tensors():
    """Return x [tokens, D], up [hidden, D] and down [D, hidden]: weights are stored [out, in]."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((TOKENS, D), (HIDDEN, D), (D, HIDDEN))
    return (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def difference(found, truth):
    worst = (found - truth).abs().max().item()
    return "the same to 12 digits" if worst < 1e-12 else f"off by up to {worst:.0f}"


def feed_forward():
    """Return the whole feed-forward's output and d_x, and of each rank its partial ones."""
    x, up, down = tensors()
    whole = F.gelu(x.requires_grad_() @ up.T) @ down.T
    whole.sum().backward()
    partial = []
    for rank in range(RANKS):
        mine = x.detach().clone().requires_grad_()
        column, row = up.chunk(RANKS, dim=0)[rank], down.chunk(RANKS, dim=1)[rank]
        y = F.gelu(mine @ column.T) @ row.T
        y.sum().backward()
        partial.append((y.detach(), mine.grad, column.shape, row.shape))
    return whole.detach(), x.grad, partial


def vocabulary():
    """Return the loss of whole logits, and that of two halves of the vocabulary, exchanging three numbers."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(TOKENS, 16, generator=generator, dtype=torch.float64)
    targets = torch.randint(16, (TOKENS,), generator=generator)
    halves = logits.chunk(RANKS, dim=1)
    largest = torch.stack([half.amax(1) for half in halves]).amax(0)  # a max over ranks
    total = sum((half - largest[:, None]).exp().sum(1) for half in halves)  # a sum over ranks
    target = torch.zeros(TOKENS, dtype=torch.float64)
    for rank, half in enumerate(halves):  # a sum: the logit of the target is on one rank alone
        local = targets - rank * 8
        mine = (local >= 0) & (local < 8)
        target += torch.where(mine, half.gather(1, local.clamp(0, 7)[:, None])[:, 0], 0.0)
    return F.cross_entropy(logits, targets), (total.log() + largest - target).mean()


def exchanged(layers, sequences, length, width, tp, bytes_each=2):
    """Return bytes that a rank hands to all-reduces of a step's layers, and how many there are."""
    count = 4 * layers  # one behind attention and one behind the feed-forward, and their mirror images
    return count, count * sequences * length * width * bytes_each if tp > 1 else 0


def main():
    y, d_x, partial = feed_forward()
    for rank, (mine, _, column, row) in enumerate(partial):
        print(f"rank {rank}: up {list(column)}, down {list(row)}; its output alone is {difference(mine, y)}")
    print("outputs added:", difference(sum(p[0] for p in partial), y))
    print("gradients of x added:", difference(sum(p[1] for p in partial), d_x))
    whole, cut = vocabulary()
    print("loss of a vocabulary in two halves:", difference(cut, whole))
    for name, layers, width in (("Llama 3 8B", 32, 4096), ("Llama 3 70B", 80, 8192)):
        count, size = exchanged(layers, 1, 8192, width, tp=8)
        print(f"{name}, a sequence of 8,192 tokens: {count} all-reduces, {size / 1e9:.1f} GB in bfloat16")


def pictures():
    parts = []
    for left, name, cut in ((150, "up [12, 8]: COLUMN", 0), (440, "down [8, 12]: ROW", 1)):
        parts.append(text(left, 16, name))
        rows, columns = ((HIDDEN, D), (D, HIDDEN))[cut]
        for rank in range(RANKS):
            high, wide = (rows // 2, columns) if cut == 0 else (rows, columns // 2)
            x, y = (0, rank * high) if cut == 0 else (rank * wide, 0)
            parts.append(rect(left + x * 14, 26 + y * 14, wide * 14 - 2, high * 14 - 2, f"c{rank}"))
            parts.append(
                text(left + (x + wide / 2) * 14, 30 + (y + high / 2) * 14, f"rank {rank}", "middle", "on")
            )
    parts.append(text(0, 110, "x, whole on both"))
    parts.append(text(290, 110, "gelu: no exchange"))
    parts.append(text(620, 90, "partial sums of y:"))
    parts.append(text(620, 110, "one all-reduce"))
    return {
        "tensor_parallelism": svg(760, 206, parts, "A matrix cut by its outputs, then one cut by its inputs")
    }


if __name__ == "__main__":
    guide(main, pictures)
