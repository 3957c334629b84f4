"""The numbers of docs/guides/low_bit_masters.md.

python docs/guides/low_bit_masters.py
"""

import torch
from drawing import guide, line, svg, text

STEPS, LR = 1000, 1e-3
MOMENTS = 2 * (1 + 2 / 32)  # a byte each, and a bfloat16 scale for 32 neighbors
NVFP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def to_nearest(x):
    return x.bfloat16().float()


def at_random(x, generator):
    """Round to one of the two neighbors in bfloat16, so that the mean is ``x``."""
    noise = torch.randint(1 << 16, x.shape, generator=generator, dtype=torch.int32)
    return ((x.view(torch.int32) + noise) >> 16 << 16).view(torch.float32)


def walks():
    """Return four weights' means over 1000 copies, at each of 1000 updates of 1e-3 from 1.0."""
    generator = torch.Generator().manual_seed(0)
    master, rounded, random, feedback = (torch.ones(1000) for _ in range(4))
    carried, path = torch.zeros(1000), []
    for _ in range(STEPS):
        master = master + LR
        rounded = to_nearest(rounded + LR)
        random = at_random(random + LR, generator)
        wanted = feedback + LR + carried
        feedback = to_nearest(wanted)
        carried = wanted - feedback
        path.append([each.mean().item() for each in (master, rounded, random, feedback)])
    return path, random.std().item()


def by_blocks(weights):
    """Round blocks of 16 to NVFP4: four bits each, and for each block a scale with three bits of mantissa."""
    blocks = weights.view(-1, 16)
    scale = (blocks.abs().amax(1, keepdim=True) / 6).to(torch.float8_e4m3fn).float()
    nearest = (blocks.abs() / scale).clamp(max=6)[..., None].sub(NVFP4).abs().argmin(-1)
    return (NVFP4[nearest] * scale * blocks.sign()).view_as(weights)


def main():
    gap = torch.finfo(torch.bfloat16).eps
    print(f"bfloat16 numbers around 1 lie {gap:.4f} apart; an update of {LR} is {LR / gap:.0%} of that")
    path, spread = walks()
    names = (
        "float32 master",
        "bfloat16 alone, to nearest",
        "bfloat16 alone, at random",
        "bfloat16 and what it lost",
    )
    for name, found in zip(names, path[-1], strict=True):
        print(f"{name:27}{found:.2f}")
    print(f"at random, copies differ by {spread:.2f}")
    for bits in (8, 16):
        finer = 2**bits
        print(f"a remainder of {bits} bits: steps of {gap / finer:.1e} around 1, {finer:,} times finer")
    weights = torch.randn(4096, generator=torch.Generator().manual_seed(1)) * 0.02
    error = ((by_blocks(weights) - weights).norm() / weights.norm()).item()
    size = f"{4 / 8 + 1 / 16:.4f} bytes a weight"
    print(f"NVFP4: {len(NVFP4) * 2 - 1} values and a scale for 16 weights: {size}, error {error:.1%}")
    print("\nbytes a parameter        weight  master  moments  in all")
    for name, weight, master, moments in (
        ("float32", 4, 0, 8),
        ("bfloat16, float32 master", 2, 4, 8),
        ("bfloat16, 8 bits beside", 2, 1, 8),
        ("  and moments in 8 bits", 2, 1, MOMENTS),
        ("NVFP4, 8 bits beside", 0.5625, 1, MOMENTS),
    ):
        print(f"{name:25}{weight:<8.2f}{master:<8.2f}{moments:<9.2f}{weight + master + moments:.2f}")


def pictures():
    path, _ = walks()
    parts = [text(60, 14, "a weight that begins at 1.0 and is to grow by 0.001 in each of 1000 steps")]
    for index, (name, kind, dy) in enumerate(
        (
            ("float32 master, and error feedback", "s0", -8),
            ("rounded to nearest", "s1", 0),
            ("rounded at random", "s2", 16),
        )
    ):
        points = [(60 + step / 2, 230 - (path[step][index] - 1) * 200) for step in range(0, STEPS, 20)]
        parts.append(line(points, kind))
        x, y = points[-1]
        parts.append(text(x + 8, y + dy, name))
    parts += [text(0, 234, "1.0"), text(0, 34, "2.0"), text(60, 250, "step 0"), text(540, 250, "step 1000")]
    return {"low_bit_masters": svg(800, 258, parts, "Which way of keeping a weight loses small updates")}


if __name__ == "__main__":
    guide(main, pictures)
