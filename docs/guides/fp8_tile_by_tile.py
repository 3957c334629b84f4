"""The numbers of docs/guides/fp8_tile_by_tile.md.

python docs/guides/fp8_tile_by_tile.py
"""

import torch
from drawing import guide, rect, svg, text

E4M3, LARGEST, TILE = torch.float8_e4m3fn, 448.0, 128


def quantized(x, scale):
    """Divide by a scale, round to E4M3, and back."""
    return (x / scale).to(E4M3).to(x.dtype) * scale


def activations():
    """Return 8 tokens of 512 numbers, one of them an outlier: [8, 512]."""
    x = torch.randn(8, 512, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 1000
    x[3, 200] = 300.0
    return x


def by_tensor(x):
    return quantized(x, x.abs().max() / LARGEST)


def by_tile(x):
    """One scale for each 128 numbers of a row, as DeepSeek-V3 quantizes activations."""
    tiles = x.unflatten(-1, (-1, TILE))
    return quantized(tiles, tiles.abs().amax(-1, keepdim=True) / LARGEST).flatten(-2)


def by_block(weight):
    """One scale for each block of 128 x 128, as it quantizes weights."""
    rows, columns = (size // TILE for size in weight.shape)
    blocks = weight.view(rows, TILE, columns, TILE)
    return quantized(blocks, blocks.abs().amax((1, 3), keepdim=True) / LARGEST).view_as(weight)


def error(found, x, where=...):
    return ((found - x)[where].norm() / x[where].norm()).item()


def tile_errors(x, found):
    """Return the relative error of each tile [8, 4]."""
    tiles, other = (each.unflatten(-1, (-1, TILE)) for each in (x, found))
    return (other - tiles).norm(dim=-1) / tiles.norm(dim=-1)


def product_errors():
    """Return relative errors of a linear layer's forward, dgrad and wgrad with all operands in FP8."""
    generator = torch.Generator().manual_seed(1)
    x, d_y = (torch.randn(256, 256, generator=generator, dtype=torch.float64) for _ in range(2))
    weight = torch.randn(256, 256, generator=generator, dtype=torch.float64) / 16
    return {
        "forward": error(by_tile(x) @ by_block(weight).T, x @ weight.T),
        "dgrad": error(by_tile(d_y) @ by_block(weight), d_y @ weight),
        "wgrad": error(by_tile(d_y.T.contiguous()) @ by_tile(x.T.contiguous()).T, d_y.T @ x),
    }


def main():
    numbers = torch.arange(128, dtype=torch.uint8).view(E4M3).double()
    numbers = numbers[numbers.isfinite()]
    print(
        f"E4M3 has {len(numbers)} numbers from 0 to {numbers.max():.0f}, the least above 0 {numbers[1]:.6f}, "
        f"the least normal one {torch.finfo(E4M3).smallest_normal:.6f}"
    )
    between = [f"{each:g}" for each in numbers.tolist() if 1 <= each <= 2]
    print("between 1 and 2:", *between)
    x, others = activations(), torch.ones(8, 512, dtype=torch.bool)
    scale = x.max().item() / LARGEST
    print(f"divided by one scale, 300 becomes {300 / scale:.0f} and 0.001 becomes {0.001 / scale:.4f}")
    others[3, 200] = False
    for name, found in (("one scale", by_tensor(x)), ("a scale for each 128", by_tile(x))):
        lost = (found == 0)[others].double().mean().item()
        print(f"{name}: error of all but the outlier {error(found, x, others):.1%}, {lost:.1%} became 0")
    x[3, 200] = 0.001
    print(f"without the outlier, one scale: error {error(by_tensor(x), x):.1%}")
    for name, each in product_errors().items():
        print(f"{name}: error {each:.1%}")
    print(f"a scale in float32 for 128 codes: {1 + 4 / TILE:.3f} bytes a number")
    print(f"for a block of 128 x 128: {1 + 4 / TILE**2:.4f}")


def pictures():
    x, parts = activations(), []
    for left, name, found in (
        (0, "one scale", by_tensor(x)),
        (380, "a scale for each tile of 128", by_tile(x)),
    ):
        parts.append(text(left, 14, name))
        for row, errors in enumerate(tile_errors(x, found).tolist()):
            for column, each in enumerate(errors):
                at = left + column * 88, 22 + row * 22
                parts.append(rect(*at, 86, 20, "c1", round(min(1.0, 0.08 + each * 2), 2)))
                parts.append(text(at[0] + 43, at[1] + 15, f"{each:.0%}", "middle"))
    told = "error of each tile of 8 tokens; the outlier is in the second tile of the fourth"
    parts.append(text(0, 214, told))
    return {"fp8_tile_by_tile": svg(740, 222, parts, "An outlier's damage, by tile")}


if __name__ == "__main__":
    guide(main, pictures)
